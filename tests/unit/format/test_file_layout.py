"""Magic, footer location, drafts, and the leaves of schemas."""

from __future__ import annotations

import struct
import time

import pytest
from memory_files import MemorySource

from parquet_keytools.errors import DraftFormatError, FileChangedError, ParquetFormatError
from parquet_keytools.format.file_layout import (
    TAIL_LENGTH,
    leaf_columns,
    read_footer_bytes,
    refuse_draft_crypto_metadata,
    refuse_draft_footer,
)
from parquet_keytools.format.structs import (
    FileCryptoMetaData,
    FileMetaData,
    SchemaElement,
)
from parquet_keytools.format.thrift import Struct, WireType


def _file(footer: bytes, *, body: bytes = b"", head: bytes = b"PAR1", tail: bytes = b"PAR1") -> bytes:
    return head + body + footer + struct.pack("<I", len(footer)) + tail


@pytest.mark.parametrize("magic", [b"PAR1", b"PARE"])
def test_a_footer_is_found_by_one_read_of_the_tail(magic: bytes) -> None:
    source = MemorySource(_file(b"footer", body=bytes(200_000), head=magic, tail=magic))
    footer = read_footer_bytes(source)
    assert bytes(footer.data) == b"footer"
    assert footer.offset == 4 + 200_000
    assert footer.is_encrypted == (magic == b"PARE")
    assert source.reads == [(source.size_bytes - TAIL_LENGTH, TAIL_LENGTH), (0, 4)]


def test_a_long_footer_takes_one_more_read() -> None:
    footer = bytes(range(256)) * 1_000
    source = MemorySource(_file(footer))
    assert bytes(read_footer_bytes(source).data) == footer
    assert len(source.reads) == 3


class ReplacedSource(MemorySource):
    """A file that is replaced by another one of the same length after its tail was read."""

    def __init__(self, data: bytes, other: bytes) -> None:
        assert len(data) == len(other)
        super().__init__(data)
        self._other = memoryview(other)

    def read_at(self, offset: int, length: int) -> memoryview:
        data = super().read_at(offset, length)
        self.data = self._other
        return data


def test_a_file_that_is_replaced_between_these_reads() -> None:
    source = ReplacedSource(_file(bytes(200_000), body=b"12345"), _file(bytes(200_005)))
    with pytest.raises(FileChangedError, match="replaced"):
        read_footer_bytes(source)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "too few"),
        (b"PAR1PAR1", "too few"),
        (b"PAR1" + bytes(100), "does not end with"),
        (_file(b"footer", head=b"PARE"), "does not begin with it"),
        (_file(b"footer", tail=b"PARE"), "does not begin with it"),
        (_file(b""), "does not fit"),
        (b"PAR1" + struct.pack("<I", 1) + b"PAR1", "does not fit"),
        (b"PAR1xx" + struct.pack("<I", 0xFFFF_FFFF) + b"PAR1", "does not fit"),
    ],
)
def test_what_is_not_a_parquet_file_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ParquetFormatError, match=reason) as caught:
        read_footer_bytes(MemorySource(data, "flights.parquet"))
    assert caught.value.path == "flights.parquet"


@pytest.mark.parametrize(
    "fields",
    [
        {2: (WireType.TRUE, None), 4: (WireType.I64, 100)},
        {2: (WireType.FALSE, None)},
        {5: (WireType.BINARY, b"iv")},
    ],
)
def test_the_2018_draft_is_named(fields: dict[int, tuple[WireType, object]]) -> None:
    with pytest.raises(DraftFormatError, match="2018 draft"):
        refuse_draft_crypto_metadata(FileCryptoMetaData(Struct(fields)))


@pytest.mark.parametrize("fields", [{9: (WireType.TRUE, None)}, {10: (WireType.BINARY, b"kf")}])
def test_the_2019_draft_is_named(fields: dict[int, tuple[WireType, object]]) -> None:
    with pytest.raises(DraftFormatError, match="2019 draft"):
        refuse_draft_footer(FileMetaData(Struct({8: (WireType.STRUCT, Struct()), **fields})))


def test_what_is_in_force_is_no_draft() -> None:
    refuse_draft_crypto_metadata(FileCryptoMetaData(Struct({2: (WireType.BINARY, b"kf")})))
    refuse_draft_footer(FileMetaData(Struct({8: (WireType.STRUCT, Struct()), 9: (WireType.BINARY, b"kf")})))
    refuse_draft_footer(FileMetaData(Struct({10: (WireType.BINARY, b"of a newer writer")})))


def _element(name: str, children: int | None = None, *, leaf: bool = False) -> SchemaElement:
    element = SchemaElement()
    if leaf:
        element.type = 1
    element.name = name
    element.num_children = children
    return element


def test_leaves_have_their_paths_ordinals_and_top_level_positions() -> None:
    schema = [
        _element("root", 4),
        _element("a", leaf=True),
        _element("b", 2),
        _element("list", 1),
        _element("element", leaf=True),
        _element("c", leaf=True),
        _element("empty", 0),
        _element("d", 0, leaf=True),
    ]
    leaves = leaf_columns(schema)
    assert [leaf.path for leaf in leaves] == [("a",), ("b", "list", "element"), ("b", "c"), ("d",)]
    assert [leaf.ordinal for leaf in leaves] == [0, 1, 2, 3]
    assert [leaf.top_level_position for leaf in leaves] == [0, 1, 1, 3]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ([], "empty"),
        ([_element("root", 2), _element("a", leaf=True)], "more children than elements"),
        ([_element("root", 1), _element("a", leaf=True), _element("b", leaf=True)], "more elements"),
        ([_element("root", -1), _element("a", leaf=True)], "more elements"),
        ([_element("root", 2**31 - 1)], "more children"),
        ([_element("root", 1), _element("a", 1, leaf=True), _element("b", leaf=True)], "at once"),
        ([_element("g", 1)] * 10_000 + [_element("a", leaf=True)], "deep"),
        (
            [_element("root", 1), _element("g" * 2**20, 32), *[_element("a", leaf=True)] * 32],
            "longer than 33554432 characters together",
        ),
    ],
)
def test_a_schema_that_is_no_tree_is_refused(schema: list[SchemaElement], reason: str) -> None:
    with pytest.raises(ParquetFormatError, match=reason):
        leaf_columns(schema)


def test_a_wide_and_deep_schema_takes_time_in_proportion() -> None:
    schema = [_element("root", 1), *(_element("g", 1) for _ in range(200)), _element("g", 20_000)]
    schema += [_element("x", leaf=True) for _ in range(20_000)]
    start = time.process_time()
    assert len(leaf_columns(schema)) == 20_000
    assert time.process_time() - start < 5
