"""What a page index must say of the pages of its chunk: the same rules for what writes files and for `verify`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, pairwise
from typing import NamedTuple

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.structs import OffsetIndex, PageLocation
from parquet_keytools.format.thrift import IntegerFields, ThriftList, WireType, read_struct

_COLUMN_INDEX_LISTS = (1, 2, 3, 5)
_REQUIRED_LISTS = (1, 2, 3)
_BOUNDARY_ORDER_ID = 4


def _numbers() -> array[int]:
    return array("q")


@dataclass
class DataPages:
    """The data pages of a chunk.

    Attributes:
        offsets: Where each begins.
        lengths: How long each is, with its header, in bytes.
        values: How many values each has; negative where that is not known.
    """

    offsets: array[int] = field(default_factory=_numbers)
    lengths: array[int] = field(default_factory=_numbers)
    values: array[int] = field(default_factory=_numbers)


class IndexRule(Enum):
    """A rule about page indexes."""

    PAGES = "the offset index has offset and size of each data page"
    ROWS = "the offset index has the first row of each data page"
    COLUMN = "the column index has an entry for each data page"


class CheckedIndex(NamedTuple):
    """What was found of a page index.

    Attributes:
        flaws: The rules that it breaks, and how.
        end: Where its Thrift structure ends in the plaintext; None where it is none.
    """

    flaws: list[tuple[IndexRule, str]]
    end: int | None


def checked_offset_index(
    data: bytes | memoryview, pages: DataPages | None, num_rows: int, *, is_flat: bool
) -> CheckedIndex:
    """Compare an offset index with the pages of its chunk.

    Args:
        data: Its plaintext.
        pages: The data pages of the chunk; None where they could not all be found.
        num_rows: Of the row group.
        is_flat: Whether each value of the column is a row.
    """
    try:
        index, end = OffsetIndex.read(data)
        locations = [_location(location) for location in index.page_locations]
    except ParquetFormatError as error:
        return CheckedIndex([(IndexRule.PAGES, str(error))], None)
    flaws: list[tuple[IndexRule, str]] = []
    rows = [row for _, _, row in locations]
    first_rows = _first_rows(pages, rows) if is_flat else rows
    increases = all(earlier <= later for earlier, later in pairwise(rows))
    if rows and (rows[0] != 0 or not increases or rows[-1] >= max(num_rows, 1)):
        flaws.append((IndexRule.ROWS, f"pages begin at rows {_some(rows)} of {num_rows}."))
    elif rows != first_rows:
        message = f"it says that pages begin at rows {_some(rows)}, and they begin at {_some(first_rows)}."
        flaws.append((IndexRule.ROWS, message))
    if pages is None:
        return CheckedIndex(flaws, end)
    found = list(zip(pages.offsets, pages.lengths, strict=True))
    stated = [(offset, length) for offset, length, _ in locations]
    wrong = next((pair for pair in zip(stated, found, strict=False) if pair[0] != pair[1]), None)
    if wrong is not None:
        (offset, length), (right_offset, right_length) = wrong
        message = f"it has a page of {length} bytes at {offset} for one of {right_length} at {right_offset}."
        flaws.append((IndexRule.PAGES, message))
    elif len(stated) != len(found):
        flaws.append((IndexRule.PAGES, f"it has {len(stated)} pages, the chunk {len(found)}."))
    return CheckedIndex(flaws, end)


_LOCATION: IntegerFields = (
    (PageLocation.offset.field_id, WireType.I64),
    (PageLocation.compressed_page_size.field_id, WireType.I32),
    (PageLocation.first_row_index.field_id, WireType.I64),
)


def _location(location: PageLocation) -> tuple[int, int, int]:
    offset, length, row = location.struct.numbers(_LOCATION)
    if offset is None or length is None or row is None:
        # One of them says what is missing.
        return location.offset, location.compressed_page_size, location.first_row_index
    return offset, length, row


def _first_rows(pages: DataPages | None, stated: list[int]) -> list[int]:
    """Return the first row of each page where that is known, else what is stated."""
    if pages is None or len(pages.values) != len(stated) or min(pages.values, default=0) < 0:
        return stated
    return list(accumulate(pages.values[:-1], initial=0)) if stated else stated


def checked_column_index(data: bytes | memoryview, pages: DataPages | None) -> CheckedIndex:
    """Compare a column index with the pages of its chunk; see `checked_offset_index`."""
    try:
        column_index, end = read_struct(data)
        lengths = {}
        for field_id in _COLUMN_INDEX_LISTS:
            value = (column_index.entry(field_id) or (None, None))[1]
            if isinstance(value, ThriftList):
                lengths[field_id] = len(value.elements)
    except ParquetFormatError as error:
        return CheckedIndex([(IndexRule.COLUMN, str(error))], None)
    problem = ""
    if any(field_id not in lengths for field_id in _REQUIRED_LISTS) or len(set(lengths.values())) != 1:
        problem = f"its lists have lengths {lengths}."
    elif column_index.types().get(_BOUNDARY_ORDER_ID) is not WireType.I32:
        problem = "its boundary_order is missing."
    elif pages is not None and lengths[1] != len(pages.offsets):
        problem = f"its lists have {lengths[1]} entries for {len(pages.offsets)} data pages."
    return CheckedIndex([(IndexRule.COLUMN, problem)] if problem else [], end)


def _some(values: Sequence[int]) -> str:
    return f"{list(values[:5])}{' and so on' if len(values) > 5 else ''}"
