"""Plaintext manifests in an encrypted table, as Spark's `rewrite_manifests` made them: refused, and reported."""

from __future__ import annotations

import io
import json
from pathlib import Path

import fastavro
import pytest
from iceberg_case import Lake, rows

from parquet_keytools import strict_base64
from parquet_keytools.errors import NotEncryptedError
from parquet_keytools.iceberg import EncryptedFileIO
from parquet_keytools.iceberg.ags1 import Ags1Writer
from parquet_keytools.iceberg.key_metadata import StandardKeyMetadata
from parquet_keytools.iceberg.located_tables import located_table
from parquet_keytools.iceberg.table_audit import TableAudit, TableReport
from parquet_keytools.kms.aes_key_wrap import wrap_key


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def decrypt_manifest(lake: Lake) -> str:
    """Replace the manifest of a table by its plaintext, in an encrypted manifest list; return its location."""
    table = lake.load()
    assert isinstance(table.io, EncryptedFileIO)
    (known,) = table.io.tables.values()
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
    with path_of(snapshot.manifest_list).open("wb") as file, Ags1Writer(file, key) as stream:
        stream.write(plaintext.getvalue())
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
    return TableAudit(located.encryption, located.service, located.open_stored, with_data=True).run()


def test_it_is_refused_and_reported_and_what_it_lists_is_checked(lake: Lake) -> None:
    lake.create().append(rows(0, 5))
    assert audit(lake).findings == []
    manifest = decrypt_manifest(lake)
    with pytest.raises(NotEncryptedError, match=f"the manifest {manifest} has no key metadata"):
        lake.load().scan().to_arrow()
    report = audit(lake)
    assert report.plaintext_files == [manifest]
    assert report.findings == [(f"manifest {manifest}", "it is a plaintext file in an encrypted table")]
    (link,) = report.links[manifest].children
    assert link.kind == "data file" and link.is_encrypted
    path_of(link.location).write_bytes(path_of(link.location).read_bytes()[:-1])
    assert len(audit(lake).findings) == 2


def test_it_is_read_where_that_is_allowed(lake: Lake) -> None:
    lake.create().append(rows(0, 5))
    decrypt_manifest(lake)
    configuration = lake.folder / "keytools.yaml"
    configuration.write_text(configuration.read_text() + "reading: {plaintext_files: allow}\n")
    assert lake.ids() == list(range(5))


def test_the_property_may_name_another_master_key_than_the_keks(lake: Lake) -> None:
    """A KEK is unwrapped with its own `encrypted-by-id`; Iceberg Java would fail here."""
    table = lake.create()
    table.append(rows(0, 5))
    document = lake.metadata()
    document["properties"]["encryption.key-id"] = "keyB"
    path_of(table.metadata_location).write_text(json.dumps(document))
    assert lake.ids() == list(range(5))
    assert audit(lake).master_key_ids == ["keyB", "keyA"]
