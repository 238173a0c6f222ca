"""Each link of an encrypted Iceberg table, changed, cut, swapped or taken from elsewhere: refused by name."""

from __future__ import annotations

import base64
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from iceberg_tables import ExpectedTable, file_io_properties, write_configuration
from pyiceberg.table import StaticTable

from parquet_keytools.errors import (
    DecryptionError,
    KeyMaterialError,
    KeyNotAvailableError,
    KeytoolsError,
    NotEncryptedError,
    WrappedKeyInvalidError,
)
from parquet_keytools.iceberg import EncryptedFileIO
from parquet_keytools.iceberg.table_audit import TableAudit, located_table

BLOCK = 12 + (1 << 20) + 16


class Victim:
    """A copy of a table, whose files an attacker may change."""

    def __init__(self, data: Path, name: str, folder: Path) -> None:
        self.warehouse = folder / "warehouse"
        shutil.copytree(data / "warehouse" / name, self.warehouse / name)
        self.expected = ExpectedTable.read(data, name)
        self.properties = file_io_properties(write_configuration(folder), self.warehouse)
        self.metadata_file = self.path(self.expected.metadata)
        self.document = json.loads(self.metadata_file.read_text())

    def path(self, location: str) -> Path:
        return self.warehouse / location.removeprefix("file:/warehouse/")

    def load(self) -> StaticTable:
        return StaticTable.from_metadata(self.expected.metadata, self.properties)

    def scan(self, number: int = -1) -> Any:
        table = self.load()
        return table.scan(snapshot_id=self.document["snapshots"][number]["snapshot-id"]).to_arrow()

    def files(self, number: int = -1) -> list[str]:
        return [file["path"] for file in self.expected.snapshots[number]["files"]]

    def read(self, location: str) -> bytes:
        """Read a file of the last snapshot through its manifests."""
        table = self.load()
        assert isinstance(table.io, EncryptedFileIO)
        current = table.current_snapshot()
        assert current is not None
        for manifest in current.manifests(table.io):
            manifest.fetch_manifest_entry(table.io)
        return table.io.read_all(location)

    def change(self, location: str, change: Callable[[bytes], bytes]) -> Callable[[], None]:
        """Change a file, and return a function that undoes it."""
        path = self.path(location)
        before = path.read_bytes()
        after = change(before)
        assert after != before
        path.write_bytes(after)

        def undo() -> None:
            path.write_bytes(before)

        return undo

    def claim(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Change the metadata file, which is not authenticated."""
        document = json.loads(json.dumps(self.document))
        change(document)
        assert document != self.document
        self.metadata_file.write_text(json.dumps(document))

    def entry(self, document: dict[str, Any], number: int) -> dict[str, Any]:
        """Return a snapshot's entry of the manifest list."""
        key_id = document["snapshots"][number]["key-id"]
        return next(entry for entry in document["encryption-keys"] if entry["key-id"] == key_id)

    def kek(self, document: dict[str, Any], number: int) -> dict[str, Any]:
        """Return a snapshot's entry of the KEK."""
        key_id = self.entry(document, number)["encrypted-by-id"]
        return next(entry for entry in document["encryption-keys"] if entry["key-id"] == key_id)


@pytest.fixture
def rotated(iceberg_test_data: Path, tmp_path: Path) -> Victim:
    return Victim(iceberg_test_data, "kek_rotated", tmp_path)


@pytest.fixture
def avro(iceberg_test_data: Path, tmp_path: Path) -> Victim:
    return Victim(iceberg_test_data, "avro_data", tmp_path)


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


# --- the metadata file ---


def test_each_byte_of_the_entries_counts(rotated: Victim) -> None:
    for kind, link in (("kek", "KEK"), ("entry", "manifest list key")):
        wrapped = base64.b64decode(getattr(rotated, kind)(rotated.document, -1)["encrypted-key-metadata"])
        for place in range(len(wrapped)):
            changed = base64.b64encode(flipped(wrapped, place)).decode()

            def change(document: dict[str, Any], kind: str = kind, changed: str = changed) -> None:
                getattr(rotated, kind)(document, -1)["encrypted-key-metadata"] = changed

            rotated.claim(change)
            with pytest.raises((WrappedKeyInvalidError, DecryptionError), match=link) as caught:
                rotated.scan()
            assert getattr(rotated, kind)(rotated.document, -1)["key-id"] in str(caught.value)


def swap(first: dict[str, Any], second: dict[str, Any], name: str) -> None:
    first[name], second[name] = second[name], first[name]


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (
            lambda v, d: swap(v.kek(d, 0), v.kek(d, -1), "encrypted-key-metadata"),
            DecryptionError,
            "manifest list key",
        ),
        (lambda v, d: swap(v.kek(d, 0), v.kek(d, -1), "properties"), DecryptionError, "KEY_TIMESTAMP"),
        (lambda v, d: v.kek(d, -1).pop("properties"), KeyMaterialError, "has no KEY_TIMESTAMP"),
        (lambda v, d: v.kek(d, -1).update({"encrypted-by-id": "keyB"}), WrappedKeyInvalidError, "KEK"),
        (
            lambda v, d: v.entry(d, -1).update({"encrypted-by-id": v.kek(d, 0)["key-id"]}),
            DecryptionError,
            "list key",
        ),
        (lambda v, d: v.entry(d, -1).update({"encrypted-by-id": "gone"}), KeyMaterialError, "the KEK 'gone'"),
        (lambda v, d: d["encryption-keys"].remove(v.kek(d, -1)), KeyMaterialError, "is not in encryption-keys"),
        (lambda v, d: d["encryption-keys"].remove(v.entry(d, -1)), KeyMaterialError, "the manifest list key"),
        (lambda v, d: d["encryption-keys"].append(v.kek(d, -1)), KeyMaterialError, "twice"),
        (
            lambda v, d: swap(v.entry(d, 1), v.entry(d, -1), "encrypted-key-metadata"),
            DecryptionError,
            "manifest list",
        ),
        (lambda v, d: swap(d["snapshots"][1], d["snapshots"][-1], "key-id"), DecryptionError, "manifest list"),
        (
            lambda v, d: swap(d["snapshots"][1], d["snapshots"][-1], "manifest-list"),
            DecryptionError,
            "manifest list",
        ),
        (lambda v, d: d["snapshots"][-1].pop("key-id"), NotEncryptedError, "manifest list"),
        (lambda v, d: v.entry(d, -1).update({"encrypted-key-metadata": "no base64!"}), KeyMaterialError, "base64"),
        (lambda v, d: d.pop("encryption-keys"), KeyMaterialError, "manifest list key"),
        (lambda v, d: d.update({"current-snapshot-id": 7}), KeyMaterialError, "current-snapshot-id is 7"),
    ],
)
def test_what_the_metadata_file_claims_is_proven(
    rotated: Victim, change: Callable[[Victim, dict[str, Any]], None], kind: type[KeytoolsError], text: str
) -> None:
    rotated.claim(lambda document: change(rotated, document))
    with pytest.raises(kind, match=text):
        rotated.scan()


def test_a_table_that_no_longer_says_that_it_is_encrypted_stays_unreadable(rotated: Victim) -> None:
    def forget(document: dict[str, Any]) -> None:
        del document["encryption-keys"], document["properties"]["encryption.key-id"]
        for snapshot in document["snapshots"]:
            del snapshot["key-id"]

    rotated.claim(forget)
    with pytest.raises(KeyNotAvailableError, match="is encrypted"):
        rotated.scan()


# --- streams ---


def test_each_region_of_a_stream_counts(rotated: Victim) -> None:
    manifest_list = rotated.document["snapshots"][-1]["manifest-list"]
    table = rotated.load()
    snapshot = table.current_snapshot()
    assert snapshot is not None
    manifest = snapshot.manifests(table.io)[0].manifest_path
    for location, name in ((manifest_list, "manifest list"), (manifest, "manifest")):
        size = rotated.path(location).stat().st_size
        for place in [*range(8 + 12 + 2), *range(40, size, 211), *range(size - 16, size, 3)]:
            undo = rotated.change(location, lambda data, at=place: flipped(data, at))  # type: ignore[misc]
            with pytest.raises(DecryptionError, match=f"the {name} {location}"):
                rotated.scan()
            undo()
        for cut in (1, 16, 28, size - 8):
            undo = rotated.change(location, lambda data, less=cut: data[:-less])  # type: ignore[misc]
            with pytest.raises(DecryptionError, match=f"the {name} {location}"):
                rotated.scan()
            undo()
    rotated.scan()


def blocks(data: bytes) -> tuple[bytes, list[bytes]]:
    return data[:8], [data[start : start + BLOCK] for start in range(8, len(data), BLOCK)]


@pytest.mark.parametrize(
    "change",
    [
        lambda head, parts: head + parts[0],
        lambda head, parts: head + parts[1],
        lambda head, parts: head + parts[1] + parts[0],
        lambda head, parts: head + parts[0] + parts[0][: len(parts[1])],
        lambda head, parts: head + parts[0] + parts[1] + parts[1],
        lambda head, parts: head + parts[0] + flipped(parts[1], 0),
        lambda head, parts: head + parts[0] + flipped(parts[1], 500),
        lambda head, parts: head + parts[0] + flipped(parts[1], len(parts[1]) - 1),
        lambda head, parts: head + flipped(parts[0], BLOCK - 1) + parts[1],
        lambda head, parts: flipped(head, 5) + parts[0] + parts[1],
        lambda head, parts: head,
        lambda head, parts: b"",
    ],
)
def test_blocks_stay_where_they_are(avro: Victim, change: Callable[[bytes, list[bytes]], bytes]) -> None:
    long = max(avro.files(), key=lambda location: avro.path(location).stat().st_size)
    assert len(blocks(avro.path(long).read_bytes())[1]) == 2
    assert avro.read(long)
    avro.change(long, lambda data: change(*blocks(data)))
    with pytest.raises(DecryptionError, match=f"data file {long}"):
        avro.read(long)


def test_a_plaintext_file_does_not_stand_for_an_encrypted_one(avro: Victim, rotated: Victim) -> None:
    (location,) = avro.files()[:1]
    length = avro.path(location).stat().st_size
    avro.change(location, lambda data: b"Obj\x01" + bytes(length - 4))
    with pytest.raises(NotEncryptedError, match="plaintext Avro"):
        avro.read(location)
    (location,) = rotated.files()[:1]
    length = rotated.path(location).stat().st_size
    rotated.change(location, lambda data: b"PAR1" + bytes(length - 12) + b"\x04\0\0\0PAR1")
    with pytest.raises(KeytoolsError):
        rotated.scan()


# --- Parquet ---


def test_each_region_of_a_data_file_counts(rotated: Victim) -> None:
    location = rotated.files()[0]
    size = rotated.path(location).stat().st_size
    for place in [*range(0, 60, 3), *range(60, size, 151), *range(size - 40, size, 3)]:
        undo = rotated.change(location, lambda data, at=place: flipped(data, at))  # type: ignore[misc]
        # Only `verify` reads indexes and Bloom filters.
        with pytest.raises(Exception, match="data file") as caught:
            rotated.scan()
            rotated.read(location)
            verify(rotated, location)
        assert isinstance(caught.value, KeytoolsError)
        assert location in str(caught.value)
        undo()
    rotated.scan()


def verify(victim: Victim, location: str) -> None:
    located = located_table(
        str(victim.metadata_file), Path(victim.properties["keytools.config"]), properties=victim.properties
    )
    report = TableAudit(located, with_data=True).run()
    problems = [problem for link, problem in report.findings if link == f"data file {location}"]
    if problems:
        raise DecryptionError(f"the data file {location}: {problems}")


def test_files_are_not_swapped_or_cut(rotated: Victim) -> None:
    first, second, _ = rotated.files()
    path, other = rotated.path(first), rotated.path(second)
    original, foreign = path.read_bytes(), other.read_bytes()
    for content in (foreign, original[:-1], original + b"\0", original[: len(original) // 2], b""):
        path.write_bytes(content)
        with pytest.raises(DecryptionError, match=f"the data file {first} has .* bytes"):
            rotated.scan()
    # With the listed length, the key does not fit.
    padded = (
        foreign[:4] + bytes(len(original) - len(foreign)) + foreign[4:] if len(original) > len(foreign) else b""
    )
    if padded:
        path.write_bytes(padded)
        with pytest.raises(KeytoolsError, match=first):
            rotated.scan()


def test_key_metadata_is_not_exchanged(rotated: Victim) -> None:
    """As if an attacker with the key of a manifest had swapped the keys of two files in it."""
    table = rotated.load()
    assert isinstance(table.io, EncryptedFileIO)
    assert table.scan().to_arrow().num_rows == 240
    known = table.io.table_at(table.metadata_location)
    assert known is not None
    files = [known.files.get(location) for location in rotated.files()[:2]]
    assert files[0] is not None and files[1] is not None
    one, two = files[0], files[1]
    known.learn("", [dataclasses.replace(one, encoded_key=two.encoded_key)])
    with pytest.raises(DecryptionError, match=f"data file {one.location}"):
        table.io.read_all(one.location)


def test_snapshots_do_not_exchange_their_manifest_lists(rotated: Victim) -> None:
    """Each list has its own key: only the list itself says which snapshot it belongs to."""

    def exchange(document: dict[str, Any]) -> None:
        one, two = document["snapshots"][:2]
        for name in ("manifest-list", "key-id"):
            one[name], two[name] = two[name], one[name]

    before = [rotated.scan(number).num_rows for number in (0, 1)]
    assert before[0] != before[1]
    rotated.claim(exchange)
    for number in (0, 1):
        with pytest.raises(DecryptionError, match=r"manifest list .* belongs to another snapshot"):
            rotated.scan(number)
