"""Plaintext footers that are made to exhaust memory: nothing is built of them before the signature is verified."""

from __future__ import annotations

import subprocess
import sys
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
from parquet_keytools.format.file_layout import UNAUTHENTICATED_BASE, UNAUTHENTICATED_FACTOR, with_trailer
from parquet_keytools.format.structs import ColumnChunk, FileMetaData, SchemaElement
from parquet_keytools.format.thrift import Struct, ThriftList, WireType
from parquet_keytools.storage.locations import BufferSource


def _varint(number: int) -> bytes:
    return bytes([number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80, number >> 14])


def _repeated(code: bytes, element: bytes) -> bytes:
    """Return 70,000 bytes of elements, after their count and a type."""
    count = 70_000 // len(element)
    return _varint(count) + code + element * count


def _list(code: int, element: bytes) -> bytes:
    return bytes([0xF0 | code]) + _repeated(b"", element)


# Each is a value and its type; it replaces the row groups, and a field that no reader knows.
_FORMS: dict[str, tuple[int, bytes]] = {
    "empty structs": (9, _list(12, b"\0")),
    "empty lists": (9, _list(9, b"\5")),
    "empty maps": (9, _list(11, b"\0")),
    "a map": (11, _repeated(b"\xcc", bytes(2))),
    "structs of a boolean": (9, _list(12, b"\x11\0")),
}


@cache
def _columns(count: int) -> tuple[bytes, bytes]:
    """Return schema and row groups of a genuine footer with many columns, whose names and offsets repeat."""
    schema, chunks = bytearray(), bytearray()
    root = SchemaElement(Struct({4: (WireType.BINARY, b"schema"), 5: (WireType.I32, count)}))
    for number in range(1000):
        name = f"column_{number}".encode()
        leaf = Struct({1: (WireType.I32, 2), 3: (WireType.I32, 1), 4: (WireType.BINARY, name)})
        schema += leaf.as_bytes()
        chunk = ColumnChunk()
        chunk.file_offset = 4 + number
        sizes = dict.fromkeys((5, 6, 7, 9), (WireType.I64, 10**9 + number))
        metadata = {1: (WireType.I32, 2), 4: (WireType.I32, 0), **sizes}
        chunk.struct.set_entry(3, (WireType.STRUCT, Struct(metadata)))
        chunks += chunk.serialise()
    times = count // 1000
    elements = b"\xfc" + _varint(count + 1) + root.serialise() + schema * times
    return elements, b"\x1c\x19\xfc" + _varint(count) + chunks * times + b"\x16\x02\x16\x02\0"


def _field(field_id: int, code: int, value: bytes) -> bytes:
    zigzag = field_id << 1
    number = bytes([zigzag]) if zigzag < 0x80 else bytes([zigzag & 0x7F | 0x80, zigzag >> 7])
    return bytes([code]) + number + value


def _forged(data: bytes, form: str, place: int, signature: bytes, *, signed: bool = True) -> bytes:
    """Return a file with another footer, and the same encryption fields."""
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
        _field(i, code, Struct({1: (code, value)}).as_bytes()[1:-1]) for i, (code, value) in kept.items()
    )
    footer += b"\0" + signature
    return data[: -8 - length] + footer + len(footer).to_bytes(4, "little") + data[-4:]


def _peak(work: Callable[[], object]) -> tuple[int, object]:
    """Return the peak memory of a task in bytes, and what it returns or raises."""
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
    """Return a third of the pairs, so that each task has two forms, and each form at least one task."""
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


@pytest.mark.parametrize("form", ["structs of a boolean", "empty structs"])
def test_what_nothing_authenticates_is_shown_within_a_limit(
    case: Case, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr("parquet_keytools.format.file_layout.UNAUTHENTICATED_BASE", 0)
    data = _forged((case.folder / "x.parquet").read_bytes(), form, 4, bytes(28))
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
    metadata, _ = FileMetaData.read(data[-8 - length : -8], max_memory=limit * 9 // 10)
    assert len(metadata.row_groups[0].columns) == len(metadata.schema) - 1 == 50_000


_SCRIPT = """
import resource, sys
from pathlib import Path
from parquet_keytools import Keytools
from parquet_keytools.errors import KeytoolsError

configuration = {"version": 1, "kms": {"type": "in_memory", "keys": {"kf": "MDEyMzQ1Njc4OTAxMjM0NQ=="}}}
configuration["tables"] = {"t": {"footer_key": "kf", "unlisted_columns": "footer_key"}}
for length, path in zip(sys.argv[1::2], map(Path, sys.argv[2::2])):
    configuration["reading"] = {"max_footer_bytes": int(length), "plaintext_files": "allow"}
    tools = Keytools.from_mapping(configuration)
    works = {
        "verify": lambda: tools.verify_file(path),
        "inspect": lambda: tools.inspect_file(path),
        "read": lambda: tools.read_table(path),
        "encrypt": lambda: tools.encrypt_file(path, path.with_suffix(".out")),
        "decrypt": lambda: tools.decrypt_file(path, path.with_suffix(".out")),
        "keys": lambda: list(tools.key_inventory(path)),
    }
    for name, work in works.items():
        try:
            found = work()
            if name == "verify":
                said = {text for rule in found.rules for text in rule.reasons}
                said |= {finding.message for finding in found.findings}
                found = "; ".join(sorted(said))
            elif name == "keys":
                found = "; ".join(map(repr, found))
            text = str(found)
        except KeytoolsError as error:
            text = f"{type(error).__name__}: {error}"
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        print(name, peak, text.replace(chr(10), " "), sep="\\t", flush=True)
"""


def _run(*files: tuple[int, Path]) -> list[tuple[str, int, str]]:
    """Return what each command did with files and their limits in another process, and its peak memory."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *(str(part) for file in files for part in file)],
        capture_output=True, text=True, check=True, timeout=600,
    )  # fmt: skip
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    return [(name, int(peak), text) for name, peak, text in rows]


_LEAVES = 1_000


def _planted_groups(chunk: bytes, length: int) -> bytes:
    """Return a footer of row groups with this chunk for each of 1,000 columns."""
    root = Struct({4: (WireType.BINARY, b"r"), 5: (WireType.I32, _LEAVES)})
    leaf = Struct({1: (WireType.I32, 2), 4: (WireType.BINARY, b"")})
    schema = ThriftList(WireType.STRUCT, [root, *[leaf] * _LEAVES])
    columns = (WireType.LIST, ThriftList(WireType.STRUCT, [chunk] * _LEAVES))
    group = Struct({1: columns, 2: (WireType.I64, 0), 3: (WireType.I64, 0)}).as_bytes()
    groups = ThriftList(WireType.STRUCT, [group] * (length // len(group)))
    fields = {1: (WireType.I32, 1), 2: (WireType.LIST, schema), 3: (WireType.I64, 0), 4: (WireType.LIST, groups)}
    return Struct(fields).as_bytes()


_CHUNKS = {
    "empty chunks": b"\0",
    "chunks of booleans": b"\x11" * 20 + b"\0",
    "chunks of metadata": b"\x3c\0\0",
    "chunks of texts": b"\x39\xf8\x1e" + bytes(30) + b"\0",
}


def test_a_planted_footer_takes_a_small_multiple_of_its_length(tmp_path: Path) -> None:
    length = 15_000_000 if SOAK else 1_500_000
    paths = [tmp_path / "empty.parquet"]
    paths[0].write_bytes(b"PAR1" + with_trailer(b"\0", b"PAR1"))
    for name, chunk in list(_CHUNKS.items())[: None if SOAK else 1]:
        paths.append(tmp_path / f"{name}.parquet")
        footer = _planted_groups(chunk, length)
        assert 0.9 * length < len(footer) < 1.1 * length
        paths[-1].write_bytes(b"PAR1" + with_trailer(footer, b"PAR1"))
    (_, before, _), *rows = _run(*((1 << 26, path) for path in paths))
    limit = before + (UNAUTHENTICATED_FACTOR + 4) * length + UNAUTHENTICATED_BASE
    assert [name for name, peak, _ in rows if peak > limit] == [], rows
    _, *read = [text for name, _, text in rows if name == "read"]
    assert len(read) == len(paths) - 1 and all("bytes of memory" in text or "chunks" in text for text in read), (
        read
    )


def test_a_footer_is_refused_that_is_longer_than_the_configuration_accepts(tmp_path: Path) -> None:
    path = tmp_path / "long.parquet"
    footer = _planted_groups(b"\0", 20_000)
    path.write_bytes(b"PAR1" + with_trailer(footer, b"PAR1"))
    refused = f"the footer has {len(footer):,} bytes, and at most {len(footer) - 1:,} are accepted."
    rows = _run((len(footer) - 1, path), (len(footer), path))
    for name, _, text in rows[:6]:
        assert refused in text, (name, text)
        # `keys` shortens the error of each file.
        assert name == "keys" or "raise `max_footer_bytes` under `reading`" in text, (name, text)
    for name, _, text in rows[6:]:
        assert "are accepted" not in text, (name, text)


def test_by_default_a_footer_may_have_64_mebibytes(tmp_path: Path, case: Case) -> None:
    path = tmp_path / "long.parquet"
    for length, is_refused in (((1 << 26) + 1, True), (1 << 26, False)):
        with path.open("wb") as file:
            file.write(b"PAR1")
            file.truncate(4 + length)
            file.seek(4 + length)
            file.write(length.to_bytes(4, "little") + b"PAR1")
        with pytest.raises(KeytoolsError) as raised:
            case.tools().read_table(path)
        assert ("at most 67,108,864 are accepted" in str(raised.value)) == is_refused
