"""The files of a folder checked as one data set, whose parts AAD prefixes or else names number (spec 4.4.1)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import islice

from parquet_keytools.conformance.file_verifier import FileFacts
from parquet_keytools.conformance.nonces import SharedNonces
from parquet_keytools.conformance.report import RuleBook, RuleResult, Scope
from parquet_keytools.encryption.protection import FooterMode

_PART = re.compile(r"part[-_.]?(\d{1,9})", re.IGNORECASE)
_RUN = re.compile(r"\d{1,9}")
_CHUNK_OF_TASK = re.compile(r"[-.]c\d{3}(?=[-.]|$)")
"""Spark numbers the files of one task too; the next task begins at 000 again."""

_MOST_NUMBERS = 1_000_000
"""Greater numbers are dates or the like."""


PartName = Sequence[str]
"""The texts that may hold the number of a part: what authenticated modules vouch for first, the file name last."""


@dataclass(frozen=True)
class Numbering:
    """Parts that are numbered alike.

    Attributes:
        template: Their name, with `#` for the number.
        begins_at: The least number that there must be.
    """

    template: str
    begins_at: int
    numbers: frozenset[int]

    def missing(self) -> Iterator[int]:
        """Yield numbers below the greatest that are not there; nothing where these are too great to be numbers."""
        if max(self.numbers) < _MOST_NUMBERS:
            yield from (
                number for number in range(self.begins_at, max(self.numbers)) if number not in self.numbers
            )


def part_ordinals(names: Sequence[PartName]) -> list[int | None]:
    """Return the number of each part: behind the word `part`, or else the only number in which names differ."""
    return [None if found is None else found[1] for found in _found(names)]


def numberings(names: Sequence[PartName]) -> list[Numbering]:
    """Return all numberings; one that is not marked by the word `part` only where it is dense enough to be one."""
    numbers: defaultdict[str, set[int]] = defaultdict(set)
    for found in _found(names):
        if found is not None:
            numbers[found[0]].add(found[1])
    result = []
    for template, found_numbers in numbers.items():
        if _is_marked(template):
            result.append(Numbering(template, 0, frozenset(found_numbers)))
        elif _is_dense(found_numbers):
            result.append(Numbering(template, min(found_numbers), frozenset(found_numbers)))
    return result


def _found(names: Sequence[PartName]) -> list[tuple[str, int] | None]:
    """Return template and number of each name; None where it has none."""
    marked = [_marked(name) for name in names]
    others = [name[-1] for name, found in zip(names, marked, strict=True) if found is None]
    counts = _template_counts(others)
    return [found or _numbered(name[-1], counts) for name, found in zip(names, marked, strict=True)]


def _marked(name: PartName) -> tuple[str, int] | None:
    for text in name:
        matches = list(_PART.finditer(text))
        if matches:
            start, end = matches[-1].span(1)
            template = f"{text[:start]}#{text[end:]}"
            return _CHUNK_OF_TASK.sub("", template), int(text[start:end])
    return None


def _is_marked(template: str) -> bool:
    return re.search(r"part[-_.]?#", template, re.IGNORECASE) is not None


def _templates(text: str) -> Iterator[tuple[str, int]]:
    for match in _RUN.finditer(text):
        yield f"{text[: match.start()]}#{text[match.end() :]}", int(match.group())


def _template_counts(texts: Sequence[str]) -> Mapping[str, int]:
    numbers: defaultdict[str, set[int]] = defaultdict(set)
    for text in texts:
        for template, number in _templates(text):
            numbers[template].add(number)
    return {template: len(found) for template, found in numbers.items()}


def _numbered(text: str, counts: Mapping[str, int]) -> tuple[str, int] | None:
    """Return the template that most names share; one that no other name has numbers nothing."""
    best = max(_templates(text), key=lambda found: counts[found[0]], default=None)
    return best if best is not None and counts[best[0]] > 1 else None


def _is_dense(numbers: set[int]) -> bool:
    return min(numbers) in (0, 1) and max(numbers) < 2 * len(numbers)


_MOST_SHOWN = 20


@dataclass(frozen=True)
class Member:
    """A file of a data set."""

    name: str
    facts: FileFacts

    @property
    def part_name(self) -> PartName:
        """What tells which part it is."""
        prefix = self.facts.aad_prefix
        texts = [self.name] if prefix is None else [prefix.decode("utf-8", "replace"), self.name]
        return [text.rpartition("/")[2] for text in texts]


@dataclass(frozen=True)
class Surroundings:
    """What else is in the folder.

    Attributes:
        listed_files: Paths within the folder of the files that a summary file lists.
        orphaned_key_materials: Names of key material files whose Parquet file is not there.
        plaintext_skipped: Paths within the folder of plaintext Parquet files that readers pass over.
        other_data: Path within the folder of each data file of another format -> its format, and what to do.
        unread: Path within the folder of what could be data, and cannot be read -> why.
        allowed_plaintext: Globs of paths within the folder of plaintext files that are accepted.
    """

    summary_files: Collection[str] = ()
    listed_files: Collection[str] = ()
    orphaned_key_materials: Collection[str] = ()
    plaintext_skipped: Collection[str] = ()
    other_data: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    allowed_plaintext: Collection[str] = ()


def check_data_set(
    members: Sequence[Member],
    surroundings: Surroundings,
    nonces: SharedNonces,
    *,
    part_count: int | None = None,
    check_list: Callable[[RuleBook], None] | None = None,
) -> tuple[RuleResult, ...]:
    """Check the rules of a data set.

    Args:
        members: Its files.
        surroundings: What else is in the folder.
        nonces: Those of all its files.
        part_count: How many parts there must be, numbered from 0; None where that is not known.
        check_list: Compares the files with a list; None without one.
    """
    book = RuleBook([Scope.DATA_SET])
    encrypted = [member for member in members if member.facts.is_encrypted]
    _check_distinct(
        "file-copied", ((member.name, [member.facts.file_unique]) for member in encrypted), "file unique", book
    )
    _check_distinct(
        "prefix-shared", ((member.name, [member.facts.aad_prefix]) for member in encrypted), "AAD prefix", book
    )
    _check_keys(encrypted, nonces, book)
    _check_plaintext(members, encrypted, surroundings, book)
    if part_count is None:
        _check_gaps(members, book)
    else:
        _check_parts(members, part_count, book)
    for name in surroundings.orphaned_key_materials:
        book.broken("part-missing", f"{name} is the key material of a missing file.")
    _check_listed(members, surroundings, book)
    _check_columns(members, book)
    if check_list is not None:
        check_list(book)
    return book.results()


def _check_keys(encrypted: Sequence[Member], nonces: SharedNonces, book: RuleBook) -> None:
    """Check what DEKs were used for; where some are not known, that is no pass."""
    unknown: dict[str, list[str]] = defaultdict(list)
    for member in encrypted:
        if member.facts.unknown is not None:
            unknown[member.facts.unknown].append(member.name)
    for reason, names in unknown.items():
        who = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        for rule_id in ("dek-shared", "nonce-shared", "invocations-shared"):
            book.not_checked(rule_id, f"{who}: {reason}")
    _check_distinct(
        "dek-shared", ((member.name, member.facts.dek_fingerprints) for member in encrypted), "DEK", book
    )
    nonces.check(book)


def _check_plaintext(
    members: Sequence[Member], encrypted: Sequence[Member], surroundings: Surroundings, book: RuleBook
) -> None:
    def is_allowed(name: str) -> bool:
        return matches_any(name, surroundings.allowed_plaintext)

    for member in members:
        if member.facts.mode is FooterMode.UNENCRYPTED and not is_allowed(member.name):
            book.broken("plaintext-among", f"{member.name} is not encrypted.")
    for name in surroundings.plaintext_skipped:
        if not is_allowed(name):
            book.broken("plaintext-skipped", f"{name} begins as a plaintext file does.")
    for name, kind in surroundings.other_data.items():
        if not is_allowed(name):
            book.broken("other-data", f"{name} is {kind}.")
    for name, reason in surroundings.unread.items():
        if not is_allowed(name):
            book.not_checked("plaintext-skipped", f"{name}: {reason}")
    if encrypted:
        for name in surroundings.summary_files:
            book.broken("summary-file", f"{name} is beside encrypted files.")
        book.holds("summary-file")
    book.holds("plaintext-among", "plaintext-skipped", "other-data")


def matches_any(name: str, globs: Iterable[str]) -> bool:
    """Return whether one of some globs matches a path within a folder; `*` matches `/`, too."""
    return any(fnmatchcase(name, glob) for glob in globs)


def _check_listed(members: Sequence[Member], surroundings: Surroundings, book: RuleBook) -> None:
    names = {member.name for member in members}
    for name in surroundings.listed_files:
        book.check("part-listed", name in names, f"{name} is listed, and it is not there.")


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
            book.broken(rule_id, f"these files have the same {what}: {shown}.")
    if owners:
        book.holds(rule_id)


def _check_gaps(members: Sequence[Member], book: RuleBook) -> None:
    for numbering in numberings([member.part_name for member in members]):
        missing = list(islice(numbering.missing(), _MOST_SHOWN + 1))
        message = f"there are no parts {_shown(missing)} of {numbering.template!r}."
        book.check("part-gap", not missing, message)


def _check_parts(members: Sequence[Member], part_count: int, book: RuleBook) -> None:
    names: dict[int, list[str]] = defaultdict(list)
    strangers: list[str] = []
    for member, ordinal in zip(members, part_ordinals([member.part_name for member in members]), strict=True):
        if ordinal is None or ordinal >= part_count:
            strangers.append(member.name)
        else:
            names[ordinal].append(member.name)
    missing = list(islice((ordinal for ordinal in range(part_count) if ordinal not in names), _MOST_SHOWN + 1))
    book.check("part-missing", not missing, f"of {part_count} parts, these are missing: {_shown(missing)}.")
    message = f"these are none of {part_count} parts: {', '.join(strangers[:5])}."
    book.check("part-doubled", not strangers, message)
    for ordinal, files in names.items():
        message = f"part {ordinal} comes {len(files)} times: {', '.join(files[:5])}."
        book.check("part-doubled", len(files) == 1, message)


def _shown(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:_MOST_SHOWN])
    return f"{shown} and more" if len(numbers) > _MOST_SHOWN else shown


def _check_columns(members: Sequence[Member], book: RuleBook) -> None:
    known = [
        (member.name, member.facts.column_paths) for member in members if member.facts.column_paths is not None
    ]
    if len(known) < len(members):
        book.not_checked("same-columns", "the columns of some files are not known")
    for name, paths in known[1:]:
        message = f"{name} has other columns than {known[0][0]}."
        book.check("same-columns", paths == known[0][1], message)
