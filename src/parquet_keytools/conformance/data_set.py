"""The files of a folder checked as one data set (spec 4.4.1)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

from parquet_keytools.conformance.file_verifier import FileFacts
from parquet_keytools.conformance.report import RuleResult
from parquet_keytools.conformance.rule_book import RuleBook
from parquet_keytools.conformance.rules import Scope

_PART = re.compile(r"part[-_.]?(\d{1,9})", re.IGNORECASE)


@dataclass(frozen=True)
class Member:
    """A file of a data set.

    Attributes:
        name: Its path within the folder.
        facts: What it was found to be.
    """

    name: str
    facts: FileFacts

    @property
    def part_ordinal(self) -> int | None:
        """The number of the part, as AAD prefix or else the file's name has it; None where there is none."""
        prefix = self.facts.aad_prefix
        text = self.name.rpartition("/")[2] if prefix is None else prefix.decode("utf-8", "replace")
        found = _PART.findall(text)
        return int(found[-1]) if found else None


def check_data_set(
    members: Sequence[Member],
    *,
    part_count: int | None,
    summary_files: Collection[str],
    orphaned_key_materials: Collection[str],
) -> tuple[RuleResult, ...]:
    """Check the rules of a data set.

    Args:
        members: Its files.
        part_count: How many parts there must be, numbered from 0; None where that is not known.
        summary_files: Names of summary files in the folder.
        orphaned_key_materials: Names of key material files whose Parquet file is not there.
    """
    book = RuleBook([Scope.DATA_SET])
    encrypted = [member for member in members if member.facts.is_encrypted]
    _check_distinct(
        "file-copied", ((member.name, [member.facts.file_unique]) for member in encrypted), "file unique", book
    )
    _check_distinct(
        "prefix-shared", ((member.name, [member.facts.aad_prefix]) for member in encrypted), "AAD prefix", book
    )
    _check_distinct(
        "dek-shared", ((member.name, member.facts.dek_fingerprints) for member in encrypted), "DEK", book
    )
    _check_parts(members, part_count, book)
    for name in orphaned_key_materials:
        book.broken("part-missing", f"{name} is the key material of a file that is not there.")
    for name in summary_files if encrypted else ():
        book.broken("summary-file", f"{name} is beside encrypted files.")
    if encrypted:
        book.holds("summary-file")
    _check_columns(members, book)
    return book.results()


def _check_distinct(
    rule_id: str, names: Iterable[tuple[str, Iterable[Hashable]]], what: str, book: RuleBook
) -> None:
    """Check that no two files have the same value."""
    owners: dict[Hashable, list[str]] = defaultdict(list)
    for name, values in names:
        for value in values:
            if value is not None:
                owners[value].append(name)
    for files in owners.values():
        if len(files) > 1:
            shown = ", ".join(files[:5]) + (f" and {len(files) - 5} more" if len(files) > 5 else "")
            book.broken(rule_id, f"one {what} is that of {shown}.")
    if owners:
        book.holds(rule_id)


def _check_parts(members: Sequence[Member], part_count: int | None, book: RuleBook) -> None:
    names: dict[int, list[str]] = defaultdict(list)
    for member in members:
        if member.part_ordinal is not None:
            names[member.part_ordinal].append(member.name)
    if part_count is None:
        if names:
            missing = sorted(set(range(max(names) + 1)) - set(names)) if max(names) < 1_000_000 else []
            book.check("part-gap", not missing, f"there are no parts {missing[:20]}.")
        return
    missing = [ordinal for ordinal in range(part_count) if ordinal not in names]
    book.check("part-missing", not missing, f"of {part_count} parts, these are missing: {missing[:20]}.")
    surplus = [ordinal for ordinal in names if ordinal >= part_count]
    book.check("part-doubled", not surplus, f"there are parts {surplus[:20]}, and {part_count} are expected.")
    for ordinal, files in names.items():
        message = f"part {ordinal} comes {len(files)} times: {', '.join(files[:5])}."
        book.check("part-doubled", len(files) == 1, message)


def _check_columns(members: Sequence[Member], book: RuleBook) -> None:
    known = [
        (member.name, member.facts.column_paths) for member in members if member.facts.column_paths is not None
    ]
    if len(known) < len(members):
        book.not_checked("same-columns", "the columns of some files are not known")
    for name, paths in known[1:]:
        message = f"{name} has other columns than {known[0][0]}."
        book.check("same-columns", paths == known[0][1], message)
