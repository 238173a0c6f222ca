"""Offset indexes for pages that moved."""

from __future__ import annotations

import pytest

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.pages import move_pages
from parquet_keytools.format.structs import OffsetIndex, PageLocation
from parquet_keytools.format.thrift import Struct, ThriftList, WireType

_MOVES = {100 * page: (1_000_000_000 * page + 7, 132 + page) for page in range(1, 40)}


def _index(count: int, *, reverse_fields: bool = False, extra: bool = False) -> OffsetIndex:
    locations = []
    for page in range(1, count + 1):
        location = PageLocation()
        location.offset, location.compressed_page_size, location.first_row_index = 100 * page, 99, 300 * page
        if reverse_fields:
            location = PageLocation(Struct(dict(reversed(list(location.struct.fields.items())))))
        locations.append(location)
    index = OffsetIndex()
    index.page_locations = locations
    if extra:
        index.struct.set_entry(2, (WireType.LIST, ThriftList(WireType.I64, list(range(count)))))
    return index


@pytest.mark.parametrize("count", [0, 1, 14, 15, 39])
@pytest.mark.parametrize("reverse_fields", [False, True])
@pytest.mark.parametrize("extra", [False, True])
def test_offsets_and_sizes_are_replaced_and_all_else_is_kept(
    count: int, reverse_fields: bool, extra: bool
) -> None:
    data = _index(count, reverse_fields=reverse_fields, extra=extra).serialise()
    moved, _ = OffsetIndex.read(move_pages(data, _MOVES))
    assert [(page.offset, page.compressed_page_size) for page in moved.page_locations] == [
        _MOVES[100 * page] for page in range(1, count + 1)
    ]
    assert [page.first_row_index for page in moved.page_locations] == [300 * p for p in range(1, count + 1)]
    assert (2 in moved.struct.fields) == extra


def test_nothing_changes_where_nothing_moved() -> None:
    data = _index(39, extra=True).serialise()
    assert move_pages(data, {100 * page: (100 * page, 99) for page in range(1, 40)}) == data


def test_an_offset_where_no_page_begins_is_refused() -> None:
    with pytest.raises(ParquetFormatError, match="no page begins"):
        move_pages(_index(3).serialise(), {100: (1, 2), 300: (3, 4)})


@pytest.mark.parametrize(
    "data", [b"", b"\x19", b"\x19\x1c", b"\x19\xfc\xff\xff\xff\xff\x0f", b"\x19\x0c", b"\xff" * 9]
)
def test_what_is_no_offset_index_is_refused(data: bytes) -> None:
    with pytest.raises(ParquetFormatError):
        move_pages(data, _MOVES)
