"""The numbers of the parts of a data set, as AAD prefixes or else names of files have them (spec 4.4.1)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_PART = re.compile(r"part[-_.]?(\d{1,9})", re.IGNORECASE)
_RUN = re.compile(r"\d{1,9}")
_CHUNK_OF_TASK = re.compile(r"[-.]c\d{3}(?=[-.]|$)")
"""Spark numbers the files of one task too; the next task begins at 000 again."""

_MOST_NUMBERS = 1_000_000
"""Greater numbers are dates or the like."""


@dataclass(frozen=True)
class PartName:
    """What is known of the place of a file among its parts.

    Attributes:
        aad_prefix: Its AAD prefix, or None.
        file_name: Its name, without folders.
    """

    aad_prefix: str | None
    file_name: str

    def texts(self) -> Iterator[str]:
        """Yield what may hold a number, what authenticated modules vouch for first."""
        if self.aad_prefix is not None:
            yield self.aad_prefix.rpartition("/")[2]
        yield self.file_name


@dataclass(frozen=True)
class Numbering:
    """Parts that are numbered alike.

    Attributes:
        template: Their name, with `#` for the number.
        begins_at: The least number that there must be.
        numbers: Those that there are.
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
    """Return the number of each part: behind the word `part`, or else the one number in which names differ."""
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
    others = [name.file_name for name, found in zip(names, marked, strict=True) if found is None]
    counts = _template_counts(others)
    return [found or _numbered(name.file_name, counts) for name, found in zip(names, marked, strict=True)]


def _marked(name: PartName) -> tuple[str, int] | None:
    for text in name.texts():
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
