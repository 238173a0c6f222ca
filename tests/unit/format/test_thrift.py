"""The reader and writer of Thrift's compact protocol."""

from __future__ import annotations

import contextlib
import tracemalloc

import pytest

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.structs import FileCryptoMetaData
from parquet_keytools.format.thrift import Changes, Struct, ThriftList, WireType, read_struct


@pytest.mark.parametrize(
    "text",
    [
        "00",
        "1500 00",
        "15ffffffff0f 16ffffffffffffffffff01 00",
        "11 12 00",
        "1803616263 00",
        "1c 15020000",
        "19 35 020406 00",
        "19f5 10 " + "00" * 16 + "00",
        "1b 00 00",
        "1b 02 58 02 0161 04 0162 00",
        "1d " + "ab" * 16 + "00",
        "17 " + "cd" * 8 + "00",
        "05 8002 02 00",
        "13 ff 00",
        "19 00 00",
    ],
)
def test_what_is_read_is_written_back(text: str) -> None:
    data = bytes.fromhex(text)
    struct, end = read_struct(data)
    assert end == len(data)
    assert struct.as_bytes() == data
    assert read_struct(memoryview(data)) == (struct, end)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "ends before"),
        ("15", "ends before"),
        ("1500", "ends before"),
        ("15ffffffffff0f00", "bits|too long"),
        ("15ffffffff1f00", "bits|too long"),
        ("16" + "ff" * 10 + "0100", "bits|too long"),
        ("1e00", "does not exist"),
        ("1f", "does not exist"),
        ("19f5ffffffff0f00", "does not fit"),
        ("18ffffffff0f00", "ends before"),
        ("18 0a 00", "ends before"),
        ("1500 0502 00 00", "twice"),
        ("1b ffffffff0f 55 00", "does not fit"),
        ("1b 01 0e 00 00", "does not exist"),
        ("1c" * 100, "deep"),
        ("19" + "1919" * 100, "deep"),
    ],
)
def test_what_is_not_a_struct_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ParquetFormatError, match=reason):
        read_struct(bytes.fromhex(text.replace(" ", "")))


def test_a_number_that_does_not_fit_is_not_written() -> None:
    with pytest.raises(ParquetFormatError, match="does not fit into 32 bits"):
        Struct({1: (WireType.I32, 1 << 31)}).as_bytes()


def test_lists_of_all_lengths_keep_their_elements() -> None:
    for count in (0, 1, 14, 15, 16, 1_000):
        struct = Struct({1: (WireType.LIST, ThriftList(WireType.I64, list(range(count))))})
        assert read_struct(struct.as_bytes())[0] == struct


_MANY = 20_000
_VARINT, _HALF = b"\xa0\x9c\x01", b"\x90\x4e"
_HOSTILE = {
    "empty structs": b"\x39\xfc" + _VARINT + bytes(_MANY) + b"\0",
    "empty lists": b"\x39\xf9" + _VARINT + b"\x05" * _MANY + b"\0",
    "empty binaries": b"\x39\xf8" + _VARINT + bytes(_MANY) + b"\0",
    "a map": b"\x3b" + _HALF + b"\xcc" + bytes(_MANY) + b"\0",
    "tiny fields": b"\x19\xcc" + (b"\x11" * 1_700 + b"\0") * 12 + b"\0",
    "an algorithm of structs": b"\x1c\x1c\x39\xfc" + _VARINT + bytes(_MANY) + b"\0\0\0",
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_what_no_key_authenticates_takes_little_memory(name: str) -> None:
    data = _HOSTILE[name]
    tracemalloc.start()
    try:
        crypto, end = FileCryptoMetaData.read(data)
        with contextlib.suppress(ParquetFormatError):
            assert crypto.encryption_algorithm.aes_gcm_v1 is not None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert end == len(data)
    assert peak < 100_000


@pytest.mark.parametrize("name", _HOSTILE)
def test_what_is_read_later_counts_too(name: str) -> None:
    data = _HOSTILE[name]
    struct, _ = read_struct(data, max_memory=400_000)
    tracemalloc.start()
    try:
        with pytest.raises(ParquetFormatError, match="takes more than 400,000 bytes of memory"):
            for _ in range(100):
                assert struct.copy().fields
                struct = next(iter(struct.fields.values()))[1] if name.startswith("an algorithm") else struct
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 800_000


_TEXT = (WireType.BINARY, b"text")
_INNER = Struct({1: (WireType.I32, 4), 2: _TEXT})
_FIELDS = {
    1: (WireType.I32, 2),
    2: (WireType.LIST, ThriftList(WireType.I32, [1, 2])),
    3: (WireType.STRUCT, _INNER),
    7: (WireType.I64, -70_000),
    9: (WireType.TRUE, None),
    40: _TEXT,
    300: (WireType.I16, -7),
}

_CHANGES: tuple[Changes, ...] = (
    {},
    {7: (WireType.I64, 12), 9: (WireType.FALSE, None)},
    {9: (WireType.I64, 5), 7: (WireType.I64, 12), 11: (WireType.I64, 4)},
    {7: (WireType.I64, -3), 11: None},
    {1: None, 2: None, 40: None, 41: None},
    {7: (WireType.I32, 1)},
    {4: (WireType.I64, 2), 301: (WireType.I64, 5)},
    {2: None, 3: None, 18: (WireType.TRUE, None), 400: (WireType.BINARY, b"x" * 200)},
    {3: (WireType.STRUCT, Struct({1: (WireType.I32, 4)}))},
    {-7: (WireType.I64, 1)},
    dict.fromkeys(_FIELDS),
)


@pytest.mark.parametrize("changes", _CHANGES)
@pytest.mark.parametrize("prefix", [b"", b"\0\0\0"])
def test_a_changed_struct_is_written_like_one_made_of_its_fields(prefix: bytes, changes: Changes) -> None:
    written = Struct(_FIELDS).as_bytes()
    struct, end = read_struct(prefix + written + b"tail", len(prefix))
    expected = {field_id: entry for field_id, entry in (_FIELDS | changes).items() if entry is not None}
    assert end == len(prefix + written)
    for _ in range(2):
        assert struct.changed_bytes(changes) == Struct(expected).as_bytes()
        assert struct.as_bytes() == written
        assert struct.fields == _FIELDS  # From now on, its lists and structs are built.
    changed = struct.copy()
    for field_id, entry in changes.items():
        changed.set_entry(field_id, entry)
    assert changed.as_bytes() == changed.changed_bytes({}) == Struct(expected).as_bytes()
    assert changed.fields == expected
    assert changed == Struct(expected)
    assert changed.types() == Struct(expected).types() == {key: entry[0] for key, entry in expected.items()}
    assert list(changed.types()) == sorted(expected)
    for field_id in (*_FIELDS, *changes):
        assert changed.entry(field_id) == expected.get(field_id)
        assert changed.entry_bytes(field_id) == Struct(expected).entry_bytes(field_id)
    assert struct.as_bytes() == written


def test_what_is_changed_in_a_value_is_changed_in_the_struct() -> None:
    struct, _ = read_struct(Struct(_FIELDS).as_bytes())
    inner, numbers = struct.entry(3), struct.entry(2)
    assert inner is not None
    assert numbers is not None
    inner[1].set_entry(5, _TEXT)
    numbers[1].elements.append(3)
    again, _ = read_struct(struct.as_bytes())
    assert again.fields[3][1].fields[5] == _TEXT
    assert again.fields[2][1].elements == [1, 2, 3]


@pytest.mark.parametrize(
    "text",
    ["15 00 55 8080808000 18 808000 00", "05 04 02 05 02 04 00", "09 06 5c 11 12 00 00 00 00 00 00"],
    ids=["padded numbers", "long headers out of order", "a long header"],
)
def test_what_is_not_changed_is_written_as_it_was(text: str) -> None:
    data = bytes.fromhex(text)
    struct, end = read_struct(data)
    assert end == len(data)
    added = struct.changed_bytes({99: _TEXT})
    assert added.startswith(data[:-1])
    assert read_struct(added)[0].changed_bytes({99: None}) == data


def test_a_struct_may_be_written_as_its_bytes() -> None:
    written = _INNER.as_bytes()
    struct, _ = read_struct(Struct(_FIELDS).as_bytes())

    def changed(*inner: Struct | bytes) -> bytes:
        listed = (WireType.LIST, ThriftList(WireType.STRUCT, list(inner)))
        return struct.changed_bytes({20: (WireType.STRUCT, inner[0]), 21: listed})

    assert changed(written, written) == changed(_INNER, written) == changed(_INNER, _INNER)


@pytest.mark.parametrize("field_id", [1, 3, 40, 300, 5])
def test_a_struct_is_cut_where_a_field_begins_and_ends(field_id: int) -> None:
    struct, _ = read_struct(b"\0" + Struct(_FIELDS).as_bytes() + b"\0", 1)
    for each in (struct, Struct(_FIELDS)):
        before, value, after = each.cut(field_id)
        assert before + (value or b"") + after == each.as_bytes()
        assert value == (Struct({9: _FIELDS[field_id]}).as_bytes()[1:-1] if field_id in _FIELDS else None)


def test_memory_that_changes_later_is_not_held() -> None:
    data = bytearray(Struct(_FIELDS).as_bytes())
    struct, _ = read_struct(memoryview(data))
    data[:] = bytes(len(data))
    assert struct.fields == _FIELDS
