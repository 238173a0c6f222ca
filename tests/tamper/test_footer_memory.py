"""Plaintext footers that are made to take memory: nothing is built of them before their signature was verified."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from rotation_case import Case
from soak import SOAK

from parquet_keytools import Keytools
from parquet_keytools.encryption.footer import read_envelope
from parquet_keytools.errors import (
    FooterSignatureError,
    KeytoolsError,
    NotEncryptedError,
    ParquetFormatError,
)
from parquet_keytools.format.file_layout import UNAUTHENTICATED_BASE, UNAUTHENTICATED_FACTOR
from parquet_keytools.format.structs import ColumnChunk, FileMetaData, SchemaElement
from parquet_keytools.format.thrift_values import Struct, WireType, write_struct
from parquet_keytools.storage.sources import BufferSource

_COUNT = 70_000
_VARINT = b"\xf0\xa2\x04"
"""Their number as it lies in the bytes."""


def _list(code: int, element: bytes) -> bytes:
    return bytes([0xF0 | code]) + _VARINT + element * _COUNT


# Each a value, and its type; it stands in place of the row groups and in a field that nobody knows.
_FORMS: dict[str, tuple[int, bytes]] = {
    "empty structs": (9, _list(12, b"\0")),
    "empty lists": (9, _list(9, b"\5")),
    "empty maps": (9, _list(11, b"\0")),
    "a map": (11, _VARINT + b"\xcc" + bytes(2 * _COUNT)),
    "structs of a boolean": (9, _list(12, b"\x11\0")),
}


@cache
def _columns(count: int) -> tuple[bytes, bytes]:
    """Return schema and row groups of an honest footer with many columns."""
    schema, chunks = bytearray(), bytearray()
    root = SchemaElement(Struct({4: (WireType.BINARY, b"schema"), 5: (WireType.I32, count)}))
    schema += root.serialise()
    for number in range(count):
        name = f"column_{number}".encode()
        leaf = Struct({1: (WireType.I32, 2), 3: (WireType.I32, 1), 4: (WireType.BINARY, name)})
        schema += write_struct(leaf)
        chunk = ColumnChunk()
        chunk.file_offset = 4 + number
        sizes = dict.fromkeys((5, 6, 7, 9), (WireType.I64, 10**9 + number))
        metadata = {1: (WireType.I32, 2), 4: (WireType.I32, 0), **sizes}
        chunk.struct.fields[3] = (WireType.STRUCT, Struct(metadata))
        chunks += chunk.serialise()
    long = bytes([0xFC, 0x80 | count & 0x7F, 0x80 | count >> 7 & 0x7F, count >> 14])
    more = bytes([0xFC, 0x80 | (count + 1) & 0x7F, 0x80 | (count + 1) >> 7 & 0x7F, (count + 1) >> 14])
    return more + bytes(schema), b"\x1c\x19" + long + bytes(chunks) + b"\x16\x02\x16\x02\0"


def _field(field_id: int, code: int, value: bytes) -> bytes:
    zigzag = field_id << 1
    number = bytes([zigzag]) if zigzag < 0x80 else bytes([zigzag & 0x7F | 0x80, zigzag >> 7])
    return bytes([code]) + number + value


def _forged(data: bytes, form: str, place: int, signature: bytes, *, signed: bool = True) -> bytes:
    """Return a file with another footer, which says the same of the encryption."""
    length = int.from_bytes(data[-8:-4], "little")
    old, _ = FileMetaData.read(data[-8 - length : -8])
    kept = {i: old.struct.fields[i] for i in ((1, 2, 3, 8, 9) if signed else (1, 2, 3)) if i != place}
    if form.endswith("columns"):
        kept.pop(2, None)
        schema, groups = _columns(int(form.partition(" ")[0].replace(",", "")))
        hostile = _field(2, 9, schema) + _field(4, 9, groups)
    else:
        code, value = _FORMS[form]
        hostile = _field(place, code, value)
    footer = hostile + b"".join(
        _field(i, code, write_struct(Struct({1: (code, value)}))[1:-1]) for i, (code, value) in kept.items()
    )
    footer += b"\0" + signature
    return data[: -8 - length] + footer + len(footer).to_bytes(4, "little") + data[-4:]


def _peak(work: Callable[[], object]) -> tuple[int, object]:
    """Return how much memory work takes at its peak, in bytes, and what it returns or raises."""
    tracemalloc.start()
    try:
        try:
            found = work()
        except KeytoolsError as error:
            found = error
        return tracemalloc.get_traced_memory()[1], found
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    case = Case.make(tmp_path_factory.mktemp("memory"), "in_memory", plaintext_footer=True)
    path = case.write()
    tools = case.tools()
    for work in (tools.read_table, tools.verify_file):
        work(path)  # Modules are imported, and keys unwrapped.
    return case


def _file(case: Case, tmp_path: Path, data: bytes) -> tuple[Keytools, Path]:
    folder = tmp_path / "hostile"
    folder.mkdir()
    path = folder / "x.parquet"
    path.write_bytes(data)
    return case.tools(), path


def _some(works: dict[str, Callable[[], object]], form: str) -> list[tuple[str, Callable[[], object]]]:
    """Return every third work, so that each comes with two forms, and each form with one work at least."""
    return list(works.items())[0 if SOAK else [*_FORMS, "10,000 columns"].index(form) % 3 :: 1 if SOAK else 3]


_SIGNATURES = {"wrong": bytes(28), "none": b"", "short": bytes(7)}


@pytest.mark.parametrize(
    ("form", "place", "signature"),
    [
        *((form, 4, "wrong") for form in [*_FORMS, "10,000 columns"]),
    ],
)
def test_a_signed_footer_is_verified_before_it_is_built(
    case: Case, tmp_path: Path, form: str, place: int, signature: str
) -> None:
    data = _forged((case.folder / "x.parquet").read_bytes(), form, place, _SIGNATURES[signature])
    tools, path = _file(case, tmp_path, data)
    length = int.from_bytes(data[-8:-4], "little")
    assert length > 64 * 1024
    target = tmp_path / "out.parquet"
    works: dict[str, Callable[[], object]] = {
        "read_table": lambda: tools.read_table(path),
        "decrypt_file": lambda: tools.decrypt_file(path, target),
        "rekey_file": lambda: tools.rekey_file(path, target),
        "verify": lambda: tools.verify_file(path),
        "rotate": lambda: tools.rotate(path.parent, moves={"kf": "new"}),
    }
    for name, work in _some(works, form):
        peak, found = _peak(work)
        assert peak < 20 * length, (name, peak / length)
        if name == "verify":
            broken = {rule.rule.id for rule in found.rules if rule.outcome.value == "broken"}  # type: ignore[attr-defined]
            assert broken & {"signature-valid", "signature-present"}, broken
        elif name == "rotate":
            assert [type(file.error) for file in found.files] == [FooterSignatureError]  # type: ignore[attr-defined]
        else:
            assert isinstance(found, FooterSignatureError), (name, found)
    assert path.read_bytes() == data and not target.exists()


@pytest.mark.parametrize("form", [*_FORMS, "10,000 columns"])
def test_a_file_that_is_not_encrypted_is_refused_before_its_footer_is_built(
    case: Case, tmp_path: Path, form: str
) -> None:
    data = _forged((case.folder / "x.parquet").read_bytes(), form, 4, b"", signed=False)
    tools, path = _file(case, tmp_path, data)
    length = int.from_bytes(data[-8:-4], "little")
    works: dict[str, Callable[[], object]] = {
        "read_table": lambda: tools.read_table(path),
        "decrypt_file": lambda: tools.decrypt_file(path, tmp_path / "out.parquet"),
        "rekey_file": lambda: tools.rekey_file(path, tmp_path / "out.parquet"),
    }
    for name, work in _some(works, form):
        peak, found = _peak(work)
        assert isinstance(found, NotEncryptedError), (name, found)
        assert peak < 20 * length, (name, peak / length)


@pytest.mark.parametrize("form", ["structs of a boolean", "empty lists"])
def test_what_nothing_authenticates_is_shown_within_a_limit(
    case: Case, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr("parquet_keytools.format.file_layout.UNAUTHENTICATED_BASE", 0)
    data = _forged((case.folder / "x.parquet").read_bytes(), form, 300, bytes(28))
    length = int.from_bytes(data[-8:-4], "little")
    envelope = read_envelope(BufferSource("x", data))
    peak, found = _peak(envelope.unverified_footer)
    assert isinstance(found, ParquetFormatError)
    assert "takes more than" in str(found) and "bytes of memory" in str(found)
    assert peak < 1.6 * UNAUTHENTICATED_FACTOR * length


def test_an_honest_footer_of_50_000_columns_is_within_the_limit(case: Case) -> None:
    data = _forged((case.folder / "x.parquet").read_bytes(), "50,000 columns", 4, b"", signed=False)
    length = int.from_bytes(data[-8:-4], "little")
    limit = UNAUTHENTICATED_FACTOR * length + UNAUTHENTICATED_BASE
    FileMetaData.read(data[-8 - length : -8], max_memory=limit * 7 // 10)
