"""What Iceberg's metadata says about encryption: the metadata file of a table, and the key metadata of a file.

The metadata file is not authenticated: everything in it is a claim. `encryption-keys` has two kinds of entries, in
any order: KEKs, wrapped by a master key of the KMS (with the property `KEY_TIMESTAMP`, in ms), and key metadata of
manifest lists, encrypted by a KEK. The `key-id` of a snapshot names an entry of the second kind. PyIceberg 0.12
drops both fields, so they are read here.

Key metadata (StandardKeyMetadata) is a version byte and then Avro binary without a header: `encryption_key` bytes,
`aad_prefix` union[null, bytes], `file_length` union[null, long]. It holds the DEK itself, so whatever holds key
metadata is encrypted.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import pyarrow as pa

from parquet_keytools import strict_base64
from parquet_keytools.encryption.module_cipher import KEY_LENGTHS_BITS
from parquet_keytools.errors import KeyMaterialError, ParquetFormatError
from parquet_keytools.format.thrift import varint
from parquet_keytools.secret_bytes import SecretBytes

KEY_ID_PROPERTY = "encryption.key-id"
KEY_LENGTH_PROPERTY = "encryption.data-key-length"
TIMESTAMP_PROPERTY = "KEY_TIMESTAMP"

MAX_METADATA_BYTES = 512 << 20


@dataclass(frozen=True)
class EncryptionKey:
    """An entry of `encryption-keys`: a KEK, or the key metadata of a manifest list, which a KEK encrypts.

    `encrypted_by_id` is the master key, or the `key_id` of the KEK. `timestamp` is the `KEY_TIMESTAMP` of a KEK,
    in ms since 1970, as written: its bytes are an AAD.
    """

    key_id: str
    encrypted: bytes = field(repr=False)
    encrypted_by_id: str
    timestamp: str | None

    @property
    def timestamp_ms(self) -> int | None:
        """When the KEK was made; None without a valid number."""
        text = self.timestamp
        return int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 19 else None


@dataclass(frozen=True)
class SnapshotKey:
    """A snapshot, its manifest list, and the entry with the key of the list; None where the list is plaintext."""

    snapshot_id: int
    manifest_list: str
    key_id: str | None


@dataclass(frozen=True)
class TableEncryption:
    """How a table is encrypted, as its metadata file says.

    Attributes:
        keys: `encryption-keys`, by `key_id`.
        snapshots: Its snapshots, in the order of the file.
        current_snapshot_id: None for an empty table.
        statistics: Locations of Puffin files with statistics, and of files with statistics of partitions.
        earlier_metadata: Locations of earlier metadata files that the metadata log names.
        document: The whole metadata file.
    """

    metadata_location: str
    location: str
    table_uuid: str
    properties: Mapping[str, str]
    keys: Mapping[str, EncryptionKey]
    snapshots: tuple[SnapshotKey, ...]
    current_snapshot_id: int | None
    statistics: tuple[str, ...]
    earlier_metadata: tuple[str, ...] = ()
    document: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def master_key_id(self) -> str | None:
        """The master key for new KEKs: the property `encryption.key-id`."""
        return self.properties.get(KEY_ID_PROPERTY)

    @property
    def is_encrypted(self) -> bool:
        """Whether any part of the metadata file says that the table is encrypted."""
        return (
            KEY_ID_PROPERTY in self.properties
            or bool(self.keys)
            or any(snapshot.key_id is not None for snapshot in self.snapshots)
        )

    @property
    def keks(self) -> tuple[EncryptionKey, ...]:
        """The entries wrapped by a master key: those that no other entry encrypts."""
        return tuple(entry for entry in self.keys.values() if entry.encrypted_by_id not in self.keys)

    @property
    def unneeded_keys(self) -> tuple[str, ...]:
        """The `key-id` of each entry that no snapshot needs, in order."""
        needed = {snapshot.key_id for snapshot in self.snapshots}
        needed |= {entry.encrypted_by_id for entry in self.keys.values() if entry.key_id in needed}
        return tuple(key_id for key_id in self.keys if key_id not in needed)

    def snapshot(self, snapshot_id: int) -> SnapshotKey | None:
        """Return the snapshot with this id, or None."""
        return next((snapshot for snapshot in self.snapshots if snapshot.snapshot_id == snapshot_id), None)


def read_metadata_file(file: pa.NativeFile, location: str) -> bytes:
    """Return the content of a metadata file; `ParquetFormatError` if it is too long."""
    if file.size() > MAX_METADATA_BYTES:
        _refuse(location, f"it is longer than {MAX_METADATA_BYTES} bytes")
    return bytes(file.read())


def read_document(content: bytes, location: str) -> dict[str, Any]:
    """Return the JSON of a metadata file, which may be compressed; `ParquetFormatError` if it is not one."""
    if content[:2] == b"\x1f\x8b":
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
                content = file.read(MAX_METADATA_BYTES + 1)
        except (OSError, EOFError, zlib.error):
            _refuse(location, "it is damaged: gzip does not decompress it")
        if len(content) > MAX_METADATA_BYTES:
            _refuse(location, f"it is longer than {MAX_METADATA_BYTES} bytes once it is decompressed")
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or "format-version" not in document:
        _refuse(location, "it is not the metadata file of an Iceberg table")
    return document


def parse_table_metadata(content: bytes, location: str) -> TableEncryption:
    """Return what a metadata file, compressed or not, says about the encryption of its table."""
    document = read_document(content, location)
    keys: dict[str, EncryptionKey] = {}
    for number, item in enumerate(_objects(document, "encryption-keys", location)):
        entry = _entry(item, f"entry {number} of encryption-keys", location)
        if entry.key_id in keys:
            raise KeyMaterialError(f"encryption-keys has {entry.key_id!r} twice", path=location)
        keys[entry.key_id] = entry
    current = document.get("current-snapshot-id")
    properties = document.get("properties") or {}
    if not isinstance(properties, dict):
        _refuse(location, "its properties are not an object")
    statistics = [
        item for name in ("statistics", "partition-statistics") for item in _objects(document, name, location)
    ]
    table = TableEncryption(
        metadata_location=location,
        location=str(document.get("location", "")),
        table_uuid=str(document.get("table-uuid", "")),
        properties={str(name): str(value) for name, value in properties.items()},
        keys=keys,
        snapshots=tuple(_snapshot(item, location) for item in _objects(document, "snapshots", location)),
        current_snapshot_id=current if type(current) is int and current != -1 else None,
        statistics=tuple(_text(item, "statistics-path", "a statistics file", location) for item in statistics),
        earlier_metadata=tuple(
            _text(item, "metadata-file", "the metadata log", location)
            for item in _objects(document, "metadata-log", location)
        ),
        document=document,
    )
    current_id = table.current_snapshot_id
    if table.is_encrypted and current_id is not None and table.snapshot(current_id) is None:
        # PyIceberg would show an empty table.
        raise KeyMaterialError(
            f"its current-snapshot-id is {current_id}, and it has no such snapshot",
            path=location,
            hint="Do not trust this metadata file; restore it from a backup.",
        )
    return table


def _entry(item: Mapping[str, Any], what: str, location: str) -> EncryptionKey:
    key_id = _text(item, "key-id", what, location)
    what = f"{what} ({key_id!r})"
    try:
        encrypted = strict_base64.decode(_text(item, "encrypted-key-metadata", what, location))
    except ValueError:
        encrypted = b""
    if not encrypted:
        raise KeyMaterialError(f"{what}: its key is not base64", path=location)
    properties = item.get("properties") or {}
    timestamp = properties.get(TIMESTAMP_PROPERTY) if isinstance(properties, dict) else None
    if timestamp is not None and not isinstance(timestamp, str):
        raise KeyMaterialError(f"{what}: {TIMESTAMP_PROPERTY} is not text", path=location)
    return EncryptionKey(key_id, encrypted, _text(item, "encrypted-by-id", what, location), timestamp)


def _snapshot(item: Mapping[str, Any], location: str) -> SnapshotKey:
    snapshot_id, key_id = item.get("snapshot-id"), item.get("key-id")
    if type(snapshot_id) is not int:
        _refuse(location, "a snapshot has no id")
    if key_id is not None and not isinstance(key_id, str):
        raise KeyMaterialError(f"snapshot {snapshot_id}: its key-id is not text", path=location)
    # Snapshots of version 1 may list manifests instead of a manifest list; they are never encrypted.
    return SnapshotKey(snapshot_id, str(item.get("manifest-list") or ""), key_id)


def _objects(document: Mapping[str, Any], name: str, location: str) -> list[dict[str, Any]]:
    items = document.get(name) or []
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        _refuse(location, f"its {name} are not a list of objects")
    return items


def _text(item: Mapping[str, Any], name: str, what: str, location: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise KeyMaterialError(f"{what} has no {name}", path=location)
    return value


def _refuse(location: str, reason: str) -> NoReturn:
    raise ParquetFormatError(f"{reason}.", path=location, hint="Check the location; or restore it from a backup.")


VERSION = 1
AAD_PREFIX_LENGTH = 16
"""Bytes of the AAD prefix of files that are written; files that are read may have a prefix of any length."""

_MAX_LENGTH = 1 << 16
_MAX_LONG = (1 << 63) - 1
_MAX_VARINT_LENGTH = 10
_NULL, _PRESENT = 0, 1


@dataclass(frozen=True)
class StandardKeyMetadata:
    """What decrypts one file of an encrypted table; the AAD prefix may be empty.

    `file_length` is the length of the encrypted file in bytes; None if the writer did not give it.
    """

    encryption_key: SecretBytes
    aad_prefix: bytes = b""
    file_length: int | None = None

    @classmethod
    def fresh(cls, length_bits: int) -> StandardKeyMetadata:
        """Return a random DEK of `length_bits` bits and a random AAD prefix, for a new file."""
        return cls(SecretBytes.random(length_bits), SecretBytes.random(AAD_PREFIX_LENGTH * 8).reveal())

    def encode(self) -> SecretBytes:
        """Return the bytes, which are as secret as the key in them."""
        key = self.encryption_key.reveal()
        encoded = bytearray((VERSION,))
        encoded += _encode_long(len(key)) + key
        if self.aad_prefix:
            encoded += _encode_long(_PRESENT) + _encode_long(len(self.aad_prefix)) + self.aad_prefix
        else:
            encoded += _encode_long(_NULL)
        if self.file_length is None:
            encoded += _encode_long(_NULL)
        else:
            encoded += _encode_long(_PRESENT) + _encode_long(self.file_length)
        return SecretBytes(encoded)

    @classmethod
    def decode(cls, encoded: SecretBytes, what: str) -> StandardKeyMetadata:
        """Decode the key metadata of `what`, which errors name; they quote no byte."""
        data = encoded.reveal()
        if data[:1] and data[0] != VERSION:
            problem = f"it has version {data[0]}, and only version {VERSION} is known"
            hint = "A newer Iceberg wrote it, or it belongs to another kind of encryption."
        else:
            try:
                return _decoded(data)
            except ValueError as error:
                problem = str(error)
            hint = "Do not trust this file; restore it, or the metadata that names it, from a backup."
        raise KeyMaterialError(f"the key metadata of {what} is not valid: {problem}.", hint=hint)


def _decoded(data: bytes) -> StandardKeyMetadata:
    """Decode the fields after the version; a `ValueError` says what is wrong, and quotes nothing."""
    if not data or len(data) > _MAX_LENGTH:
        raise ValueError(f"it has {len(data)} bytes")
    position = 1

    def decode_long(name: str) -> int:
        nonlocal position
        value = 0
        for index in range(_MAX_VARINT_LENGTH):
            if position >= len(data):
                raise ValueError(f"it ends within its {name}")
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:
                # One encoding of each number is valid, so changed bytes never mean the same.
                if (index and not byte) or value >> 64:
                    break
                return (value >> 1) ^ -(value & 1)
        raise ValueError(f"its {name} has a number that Avro does not write")

    def decode_bytes(name: str) -> bytes:
        nonlocal position
        length = decode_long(name)
        if not 0 <= length <= len(data) - position:
            raise ValueError(f"its {name} does not end within it")
        position += length
        return data[position - length : position]

    def is_present(name: str) -> bool:
        branch = decode_long(name)
        if branch not in (_NULL, _PRESENT):
            raise ValueError(f"its {name} is neither null nor a value")
        return branch == _PRESENT

    key = SecretBytes(decode_bytes("encryption_key"))
    if key.length_bits not in KEY_LENGTHS_BITS:
        raise ValueError(f"its key has {key.length_bits} bits, not 128, 192 or 256")
    aad_prefix = decode_bytes("aad_prefix") if is_present("aad_prefix") else b""
    file_length = decode_long("file_length") if is_present("file_length") else None
    if file_length is not None and file_length < 0:
        raise ValueError("its file_length is negative")
    if position != len(data):
        raise ValueError(f"{len(data) - position} bytes follow its last field")
    return StandardKeyMetadata(key, aad_prefix, file_length)


def _encode_long(value: int) -> bytes:
    if not 0 <= value <= _MAX_LONG:
        raise ValueError(f"{value} is not a length")
    return varint(value << 1)
