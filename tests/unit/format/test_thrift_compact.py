"""The reader and writer of Thrift's compact protocol."""

from __future__ import annotations

import tracemalloc

import pytest

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.structs import FileCryptoMetaData
from parquet_keytools.format.thrift_compact import read_struct
from parquet_keytools.format.thrift_skim import check_value_count
from parquet_keytools.format.thrift_values import Struct, ThriftList, ThriftMap, WireType, write_struct


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
    assert write_struct(struct) == data
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
        ("18ffffffff0f00", "does not fit"),
        ("18 0a 00", "does not fit"),
        ("1500 0502 00 00", "twice"),
        ("1b ffffffff0f 55 00", "does not fit"),
        ("1b 01 0e 00 00", "do not exist"),
        ("1c" * 100, "deep"),
        ("19" + "1919" * 100, "deep"),
    ],
)
def test_what_is_not_a_struct_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ParquetFormatError, match=reason):
        read_struct(bytes.fromhex(text.replace(" ", "")))


def test_a_number_that_does_not_fit_is_not_written() -> None:
    with pytest.raises(ParquetFormatError, match="does not fit into 32 bits"):
        write_struct(Struct({1: (WireType.I32, 1 << 31)}))


def test_lists_of_all_lengths_keep_their_elements() -> None:
    for count in (0, 1, 14, 15, 16, 1_000):
        struct = Struct({1: (WireType.LIST, ThriftList(WireType.I64, list(range(count))))})
        assert read_struct(write_struct(struct))[0] == struct


_MANY = 300_000
_HOSTILE = {
    "empty structs": b"\x39\xfc" + b"\xe0\xa7\x12" + bytes(_MANY) + b"\0",
    "empty lists": b"\x39\xf9" + b"\xe0\xa7\x12" + b"\x05" * _MANY + b"\0",
    "empty binaries": b"\x39\xf8" + b"\xe0\xa7\x12" + bytes(_MANY) + b"\0",
    "a map": b"\x3b" + b"\xf0\x93\x09" + b"\xcc" + bytes(_MANY) + b"\0",
    "tiny fields": b"\x11" * _MANY + b"\0",
    "an algorithm of structs": b"\x1c\x1c\x39\xfc" + b"\xe0\xa7\x12" + bytes(_MANY) + b"\0\0\0",
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_what_no_key_authenticates_takes_little_memory(name: str) -> None:
    data = _HOSTILE[name]
    tracemalloc.start()
    try:
        with pytest.raises(ParquetFormatError, match=r"FileCryptoMetaData: .* more than 1,000 values"):
            FileCryptoMetaData.read(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(data)


def test_values_are_counted_as_they_are_read() -> None:
    inner = Struct({1: (WireType.TRUE, None), 2: (WireType.LIST, ThriftList(WireType.I64, [1, 2, 3]))})
    many = ThriftMap(WireType.BINARY, WireType.STRUCT, [(b"a", inner), (b"b", inner)])
    struct = Struct({1: (WireType.MAP, many), 5: (WireType.DOUBLE, bytes(8)), 400: (WireType.I16, 7)})
    # The struct, the map, in it twice a key, a struct, its boolean and its list of three; the double, the integer.
    data = write_struct(struct)
    check_value_count(data, 0, 1 + 1 + 2 * (1 + 1 + 1 + 4) + 2)
    with pytest.raises(ParquetFormatError, match="more than 17 values"):
        check_value_count(data, 0, 17)
