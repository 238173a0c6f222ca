"""Plaintext manifests in an encrypted table, as Spark's `rewrite_manifests` made them: refused, and reported."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import fastavro
import pytest
from iceberg_case import Lake, rows

from parquet_keytools import strict_base64
from parquet_keytools.errors import DecryptionError, NotEncryptedError, ParquetFormatError
from parquet_keytools.iceberg import EncryptedFileIO, metadata
from parquet_keytools.iceberg.ags1 import encrypted
from parquet_keytools.iceberg.metadata import StandardKeyMetadata
from parquet_keytools.iceberg.table_audit import TableAudit, TableReport, located_table
from parquet_keytools.kms.aes_key_wrap import wrap_key


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def decrypt_manifest(lake: Lake) -> str:
    """Replace a table's manifest by its plaintext, in an encrypted manifest list; return its location."""
    table = lake.load()
    assert isinstance(table.io, EncryptedFileIO)
    known = table.known()
    snapshot = table.current_snapshot()
    assert snapshot is not None
    (manifest,) = snapshot.manifests(table.io)
    content = table.io.read_all(manifest.manifest_path)
    reader = fastavro.reader(io.BytesIO(table.io.read_all(snapshot.manifest_list)))
    (record,) = list(reader)
    record.update(key_metadata=None, manifest_length=len(content))
    header = {name: value for name, value in reader.metadata.items() if not name.startswith("avro.")}
    plaintext = io.BytesIO()
    fastavro.writer(plaintext, reader.writer_schema, [record], metadata=header)
    path_of(manifest.manifest_path).write_bytes(content)
    key = StandardKeyMetadata.fresh(128)
    path_of(snapshot.manifest_list).write_bytes(b"".join(encrypted(plaintext.getvalue(), key)))
    length = path_of(snapshot.manifest_list).stat().st_size
    complete = StandardKeyMetadata(key.encryption_key, key.aad_prefix, length)
    document = lake.metadata()
    (entry,) = [e for e in document["encryption-keys"] if "properties" not in e]
    (kek,) = [e for e in document["encryption-keys"] if "properties" in e]
    timestamp = kek["properties"]["KEY_TIMESTAMP"].encode()
    entry["encrypted-key-metadata"] = wrap_key(known.chain.kek(kek["key-id"]), complete.encode(), timestamp)
    path_of(table.metadata_location).write_text(json.dumps(document))
    assert strict_base64.decode(entry["encrypted-key-metadata"])
    return manifest.manifest_path


def path_of(location: str) -> Path:
    return Path(location.removeprefix("file://"))


def audit(lake: Lake) -> TableReport:
    located = located_table(lake.load().metadata_location, lake.folder / "keytools.yaml")
    return TableAudit(located, with_data=True).run()


@pytest.mark.parametrize("plaintext_files", ["reject", "allow"])
def test_it_is_reported_and_never_read(lake: Lake, plaintext_files: str) -> None:
    lake.create().append(rows(0, 5))
    assert audit(lake).findings == []
    manifest = decrypt_manifest(lake)
    configuration = lake.folder / "keytools.yaml"
    configuration.write_text(configuration.read_text() + f"reading: {{plaintext_files: {plaintext_files}}}\n")
    with pytest.raises(NotEncryptedError, match=f"the manifest {manifest} has no key metadata"):
        lake.load().scan().to_arrow()
    report = audit(lake)
    assert report.plaintext_files == [manifest]
    assert report.findings == [(f"manifest {manifest}", "it is a plaintext file in an encrypted table")]
    # It is unknown which files the table names.
    assert report.links[manifest].children == [] and report.orphans is None


def test_the_property_may_name_another_master_key_than_the_keks(lake: Lake) -> None:
    """A KEK is unwrapped with its own `encrypted-by-id`; Iceberg Java would fail here."""
    table = lake.create()
    table.append(rows(0, 5))
    document = lake.metadata()
    document["properties"]["encryption.key-id"] = "keyB"
    path_of(table.metadata_location).write_text(json.dumps(document))
    assert lake.ids() == list(range(5))
    assert audit(lake).master_key_ids == ["keyB", "keyA"]


@pytest.mark.parametrize("name", ["list.json", "list.json.gz", "version-hint.text"])
def test_no_name_makes_a_plaintext_manifest_list_one_that_is_read(lake: Lake, name: str) -> None:
    lake.create().append(rows(0, 5))
    table = lake.load()
    assert isinstance(table.io, EncryptedFileIO)
    snapshot = table.current_snapshot()
    assert snapshot is not None
    plaintext = lake.table_folder / "metadata" / name
    plaintext.write_bytes(table.io.read_all(snapshot.manifest_list))
    document = lake.metadata()
    document["snapshots"][0]["manifest-list"] = f"file://{plaintext}"
    path_of(table.metadata_location).write_text(json.dumps(document))
    with pytest.raises(DecryptionError, match=rf"{name} of snapshot .* it is another file"):
        lake.load().scan().to_arrow()
    # One that no snapshot has is no metadata file and no hint either.
    elsewhere = plaintext.with_name(f"other-{name}")
    plaintext.rename(elsewhere)
    with pytest.raises(NotEncryptedError, match="no key metadata"):
        table.io.read_all(f"file://{elsewhere}")
    elsewhere.write_text("12\n")
    if name.endswith(".text"):
        assert table.io.read_all(f"file://{elsewhere}") == b"12\n"


def test_a_metadata_file_is_not_decompressed_without_end(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.create()
    content = json.dumps(lake.metadata()).encode() + b" " * 100_000
    compressed = gzip.compress(content)
    monkeypatch.setattr(metadata, "MAX_METADATA_BYTES", len(content))
    assert metadata.parse_table_metadata(compressed, "here").is_encrypted
    monkeypatch.setattr(metadata, "MAX_METADATA_BYTES", len(content) - 1)
    with pytest.raises(ParquetFormatError, match=r"longer than .* once it is decompressed"):
        metadata.parse_table_metadata(compressed, "here")
    with pytest.raises(ParquetFormatError, match="gzip does not decompress it"):
        metadata.parse_table_metadata(compressed[:30] + b"\xff" * 40, "here")


def test_whatever_a_metadata_file_claims_the_report_goes_on(lake: Lake) -> None:
    lake.create().append(rows(0, 5))
    lake.load().append(rows(5, 9))
    location = lake.load().metadata_location
    document = lake.metadata()
    document["snapshots"][0]["manifest-list"] = "unknown://place/list.avro"
    document["partition-statistics"] = [{"statistics-path": "file:///\0"}]
    document["properties"]["encryption.key-id"] = "keyB"
    path_of(location).write_text(json.dumps(document))
    located = located_table(location, lake.folder / "keytools.yaml")
    report = TableAudit(located, with_data=True).run()
    problems = dict(report.findings)
    assert "encryption.key-id is 'keyB'" in problems[f"metadata file {location}"]
    assert "which is in 'unknown'" in problems["manifest list unknown://place/list.avro"]
    assert len(report.findings) == 4 and sum("file:///\0" in link for link, _ in report.findings) == 2
    assert report.lists[1].children
