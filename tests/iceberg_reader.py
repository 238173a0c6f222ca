"""Encrypted Iceberg tables, read without our code: from the format's specification, with other libraries.

It reads the results of append, overwrite and delete of whole files: no delete files, no schema changes.
"""

from __future__ import annotations

import base64
import io
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEYS = {"keyA": b"0123456789012345", "keyB": b"1123456789012345", "master-1": bytes(range(16))}
"""The master keys of the tables from other writers."""

BLOCK = 1 << 20


def open_sealed(key: bytes, sealed: bytes, aad: bytes | None) -> bytes:
    return AESGCM(key).decrypt(sealed[:12], sealed[12:], aad)


def key_metadata(data: bytes) -> tuple[bytes, bytes, int | None]:
    """Return the file's key, AAD prefix and length."""
    assert data[0] == 1
    schema = {
        "type": "record",
        "name": "metadata",
        "fields": [
            {"name": "encryption_key", "type": "bytes"},
            {"name": "aad_prefix", "type": ["null", "bytes"]},
            {"name": "file_length", "type": ["null", "long"]},
        ],
    }
    stream = io.BytesIO(data[1:])
    found = fastavro.schemaless_reader(stream, schema, schema)
    assert isinstance(found, dict)
    assert not stream.read()
    return found["encryption_key"], found["aad_prefix"] or b"", found["file_length"]


def open_stream(metadata: bytes, data: bytes) -> bytes:
    """Return the plaintext of an AGS1 stream."""
    key, prefix, length = key_metadata(metadata)
    assert length in (None, len(data))
    assert data[:8] == b"AGS1" + struct.pack("<I", BLOCK)
    blocks = [data[start : start + BLOCK + 28] for start in range(8, len(data), BLOCK + 28)]
    assert blocks
    return b"".join(open_sealed(key, block, prefix + struct.pack("<I", n)) for n, block in enumerate(blocks))


def write_stream(metadata: bytes, plaintext: bytes) -> bytes:
    """Return an AGS1 stream; an empty one has one empty block."""
    key, prefix, _ = key_metadata(metadata)
    out = b"AGS1" + struct.pack("<I", BLOCK)
    for n, start in enumerate(range(0, max(1, len(plaintext)), BLOCK)):
        nonce = struct.pack("<QI", 7, n)
        out += nonce + AESGCM(key).encrypt(nonce, plaintext[start : start + BLOCK], prefix + struct.pack("<I", n))
    return out


@dataclass
class Warehouse:
    """The location of a table's files.

    Attributes:
        folder: Replaces `prefix`, with which each location begins.
        prefix: The beginning of each location.
        keys: The master keys.
    """

    folder: Path
    prefix: str = "file:/warehouse"
    keys: dict[str, bytes] = field(default_factory=lambda: KEYS)

    def read(self, location: str) -> bytes:
        assert location.startswith(self.prefix)
        return (self.folder / location.removeprefix(self.prefix).lstrip("/")).read_bytes()

    def snapshots(self, metadata: dict[str, Any]) -> Iterator[int]:
        for snapshot in metadata.get("snapshots", []):
            yield snapshot["snapshot-id"]

    def manifests(self, metadata: dict[str, Any], snapshot_id: int) -> Iterator[dict[str, Any]]:
        """Yield what a snapshot's manifest list says about each manifest."""
        (snapshot,) = [s for s in metadata["snapshots"] if s["snapshot-id"] == snapshot_id]
        entries = {entry["key-id"]: entry for entry in metadata["encryption-keys"]}
        entry = entries[snapshot["key-id"]]
        wrapped = entries[entry["encrypted-by-id"]]
        master_key = self.keys[wrapped["encrypted-by-id"]]
        assert wrapped["encrypted-by-id"] == metadata["properties"]["encryption.key-id"]
        kek = open_sealed(master_key, base64.b64decode(wrapped["encrypted-key-metadata"]), None)
        age = wrapped["properties"]["KEY_TIMESTAMP"].encode()
        metadata_of_list = open_sealed(kek, base64.b64decode(entry["encrypted-key-metadata"]), age)
        plaintext = open_stream(metadata_of_list, self.read(snapshot["manifest-list"]))
        yield from fastavro.reader(io.BytesIO(plaintext))  # type: ignore[misc]

    def entries(self, metadata: dict[str, Any], snapshot_id: int) -> Iterator[dict[str, Any]]:
        """Yield the manifest entry of each file of a snapshot."""
        for manifest in self.manifests(metadata, snapshot_id):
            for entry in self.entries_of(manifest):
                if entry["status"] != 2:
                    yield entry

    def entries_of(self, manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield all entries of a manifest, including deleted files."""
        data = self.read(manifest["manifest_path"])
        assert len(data) == manifest["manifest_length"]
        yield from fastavro.reader(io.BytesIO(open_stream(manifest["key_metadata"], data)))  # type: ignore[misc]

    def table(self, metadata: dict[str, Any], snapshot_id: int) -> pa.Table:
        """Return the rows of a snapshot."""
        tables = []
        for entry in self.entries(metadata, snapshot_id):
            file = entry["data_file"]
            data = self.read(file["file_path"])
            key, prefix, length = key_metadata(file["key_metadata"])
            assert length == file["file_size_in_bytes"] == len(data)
            assert data[:4] == data[-4:] == b"PARE"
            properties = pe.create_decryption_properties(footer_key=key, aad_prefix=prefix)
            table = pq.read_table(io.BytesIO(data), decryption_properties=properties)
            assert len(table) == file["record_count"]
            tables.append(table)
        return pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})


def current_metadata(folder: Path) -> dict[str, Any]:
    """Return the newest metadata of a table whose files are numbered."""
    found: dict[str, Any] = json.loads(max((folder / "metadata").glob("*.metadata.json")).read_text())
    return found
