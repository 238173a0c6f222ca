"""Page headers with a number of flipped sign: by a writer with keys, or by anyone if pages are in plaintext."""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from soak import sample
from vector_kit.plain_file import ROW_GROUP_ROWS, TABLE
from vector_kit.sealed_file import DATA_PAGE, DICTIONARY_PAGE, Place
from vector_kit.vector import SealedFile, recipe
from vector_kit.write_kit import data_keys

from parquet_keytools import Keytools
from parquet_keytools.conformance.report import Outcome
from parquet_keytools.errors import KeytoolsError
from parquet_keytools.format.structs import PageHeader
from parquet_keytools.format.thrift import Struct, WireType

KINDS: dict[str, dict[str, Any]] = {
    "AES-GCM": {},
    "AES-GCM-CTR": {"is_ctr": True},
    "plaintext footer": {"plaintext_footer": True},
    "a plaintext column": {"columns": {}},
}
PAGES = (
    (DATA_PAGE, 0, 0, 1),
    (DICTIONARY_PAGE, 0, 1),
    (DATA_PAGE, 0, 1, 1),
    (DATA_PAGE, 0, 2, 1),
)
PLAIN_FILES: tuple[dict[str, Any], ...] = ({"crc": True}, {"v2": True, "compression": "snappy"})
CRC = (4,)

FieldPath = tuple[int, ...]


def keytools() -> Keytools:
    keys = {name: base64.b64encode(key).decode() for name, key in data_keys().items()}
    return Keytools.from_mapping({"version": 1, "data_keys": keys})


def numbers(struct: Struct, path: FieldPath = ()) -> Iterator[FieldPath]:
    for field_id, (wire_type, value) in struct.fields.items():
        if wire_type is WireType.I32:
            yield (*path, field_id)
        elif wire_type is WireType.STRUCT:
            yield from numbers(value, (*path, field_id))


def flip_sign(struct: Struct, path: FieldPath) -> None:
    """Flip the lowest bit of a zigzag varint."""
    *outer, field_id = path
    for outer_id in outer:
        struct = struct.fields[outer_id][1]
    wire_type, value = struct.fields[field_id]
    struct.set_entry(field_id, (wire_type, ~value))


@functools.cache
def files(kind: str) -> list[tuple[str, bytes]]:
    """Return files that each have one number of one page header with a flipped sign."""
    made = []
    for plain in PLAIN_FILES:
        for wanted in PAGES:
            found: list[FieldPath] = []

            def look(place: Place, header: PageHeader, wanted: Place = wanted, found: Any = found) -> None:
                if place == wanted:
                    found.extend(numbers(header.struct))

            SealedFile(recipe(1, page_header=look, **KINDS[kind]), plain).make()
            assert len(found) >= 5
            for path in found:

                def change(place: Place, header: PageHeader, wanted: Place = wanted, path: Any = path) -> None:
                    if place == wanted:
                        flip_sign(header.struct, path)

                data = SealedFile(recipe(1, page_header=change, **KINDS[kind]), plain).make()
                made.append((f"field {path} of {wanted} in {plain}", data))
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::parquet_keytools.config.settings.ConfigurationWarning")
def test_verify_names_the_header_with_a_negative_number(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.parquet"
    with keytools() as tools:
        for name, data in files(kind):
            path.write_bytes(data)
            report = tools.verify_file(path)
            broken = {result.rule.id for result in report.rules if result.outcome is Outcome.BROKEN}
            if name.startswith(f"field {CRC}"):
                # It may be any number; a page has another one.
                assert "crc" in " ".join(broken), (name, broken)
            else:
                assert broken & {"page-header", "page-type"}, (name, broken)


def table(tools: Keytools, path: Path) -> pa.Table:
    return tools.read_table(path)


def data_set(tools: Keytools, path: Path) -> pa.Table:
    return tools.dataset(path).to_table()


def view(tools: Keytools, path: Path) -> pa.Table:
    return pq.read_table(pa.PythonFile(tools.open(path), mode="r"))


def decrypted(tools: Keytools, path: Path) -> pa.Table:
    tools.decrypt_file(path, path.with_name("decrypted"))
    return pq.read_table(path.with_name("decrypted"))


def salvaged(tools: Keytools, path: Path) -> pa.Table:
    tools.salvage_file(path, path.with_name("salvaged"))
    return pq.read_table(path.with_name("salvaged"))


def inspected(tools: Keytools, path: Path) -> pa.Table:
    tools.inspect_file(path)
    return TABLE


@pytest.mark.parametrize("read", [table, data_set, view, decrypted, salvaged, inspected], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::parquet_keytools.config.settings.ConfigurationWarning")
def test_no_reader_ends_or_gives_wrong_values(
    tmp_path: Path, kind: str, read: Callable[[Keytools, Path], pa.Table]
) -> None:
    """The message is ours, or pyarrow's for fields that only pyarrow checks."""
    path = tmp_path / "x.parquet"
    right = [TABLE, TABLE.slice(ROW_GROUP_ROWS)] if read is salvaged else [TABLE]
    refused = 0
    with keytools() as tools:
        for name, data in sample(files(kind), 12, len(read.__name__)):
            path.write_bytes(data)
            try:
                found = read(tools, path)
            except (KeytoolsError, OSError, pa.ArrowException):
                refused += 1
            else:
                assert any(found.equals(table) for table in right), name
    assert refused or read in (salvaged, inspected)
