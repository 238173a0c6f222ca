"""What Iceberg's metadata says of encryption: the metadata file of a table, and the key metadata of one file.

Nobody authenticates the metadata file: all of it is a claim. `encryption-keys` has entries of two kinds, in any
order: KEKs, which a master key of a KMS wraps (with the property `KEY_TIMESTAMP`, in ms), and the key metadata
of manifest lists, which a KEK encrypts. `key-id` of a snapshot names the latter. PyIceberg 0.12 drops both
fields, so they are read here.

Key metadata (StandardKeyMetadata) is one byte of version and then Avro binary without a header:
`encryption_key` bytes, `aad_prefix` union[null, bytes], `file_length` union[null, long]. It holds the DEK
itself: whatever carries it is encrypted.
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
from parquet_keytools.encryption.aes import KEY_LENGTHS_BITS
from parquet_keytools.errors import KeyMaterialError, ParquetFormatError
from parquet_keytools.secret_bytes import SecretBytes

KEY_ID_PROPERTY = "encryption.key-id"
KEY_LENGTH_PROPERTY = "encryption.data-key-length"
TIMESTAMP_PROPERTY = "KEY_TIMESTAMP"

MAX_METADATA_BYTES = 512 << 20


@dataclass(frozen=True)
class EncryptionKey:
    """An entry of `encryption-keys`.

    Attributes:
        key_id: Its name in this table.
        encrypted: The wrapped KEK, or the encrypted key metadata of a manifest list.
        encrypted_by_id: The master key, or the KEK's `key_id`.
        timestamp: `KEY_TIMESTAMP` of a KEK, in ms since 1970, as it is written: its bytes are an AAD.
    """

    key_id: str
    encrypted: bytes = field(repr=False)
    encrypted_by_id: str
    timestamp: str | None

    @property
    def timestamp_ms(self) -> int | None:
        """When the KEK was made; None where nothing, or no number, says it."""
        text = self.timestamp
        return int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 19 else None


@dataclass(frozen=True)
class SnapshotKey:
    """A snapshot, its manifest list, and the entry with the key of the list: None where that is plaintext."""

    snapshot_id: int
    manifest_list: str
    key_id: str | None
    timestamp_ms: int


@dataclass(frozen=True)
class TableEncryption:
    """How a table is encrypted, as its metadata file says.

    Attributes:
        metadata_location: The metadata file.
        location: Where the table lies.
        table_uuid: Its UUID, as it says.
        properties: Its properties.
        keys: `encryption-keys`, by `key_id`.
        snapshots: Its snapshots, in the order of the file.
        current_snapshot_id: None where the table is empty.
        earlier_metadata: Locations of the metadata files before, as far as it lists them.
        statistics: Locations of Puffin files with statistics of the table, and of files with those of partitions.
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
        """Whether anything in it says that the table is encrypted."""
        return (
            KEY_ID_PROPERTY in self.properties
            or bool(self.keys)
            or any(snapshot.key_id is not None for snapshot in self.snapshots)
        )

    @property
    def keks(self) -> tuple[EncryptionKey, ...]:
        """The entries that a master key wraps: those that no other entry encrypts."""
        return tuple(entry for entry in self.keys.values() if entry.encrypted_by_id not in self.keys)

    @property
    def unneeded_keys(self) -> tuple[str, ...]:
        """The `key-id` of each entry that no snapshot needs, in their order."""
        needed = {snapshot.key_id for snapshot in self.snapshots}
        needed |= {entry.encrypted_by_id for entry in self.keys.values() if entry.key_id in needed}
        return tuple(key_id for key_id in self.keys if key_id not in needed)

    def snapshot(self, snapshot_id: int) -> SnapshotKey | None:
        """Return a snapshot, or None where there is none of this id."""
        return next((snapshot for snapshot in self.snapshots if snapshot.snapshot_id == snapshot_id), None)


def read_metadata_file(file: pa.NativeFile, location: str) -> bytes:
    """Return a metadata file as it is stored, unless it is too long to be one (`ParquetFormatError`)."""
    if file.size() > MAX_METADATA_BYTES:
        _refuse(location, f"it is longer than {MAX_METADATA_BYTES} bytes")
    return bytes(file.read())


def read_document(content: bytes, location: str) -> dict[str, Any]:
    """Return a metadata file as it is, decompressed; arguments and errors as with `parse_table_metadata`."""
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
        _refuse(location, "it is no metadata file of an Iceberg table")
    return document


def parse_table_metadata(content: bytes, location: str) -> TableEncryption:
    """Return what a metadata file, compressed with gzip or not, says of the encryption of its table.

    Raises:
        ParquetFormatError: It is no metadata file.
        KeyMaterialError: Its `encryption-keys` are not what the format says, or its current snapshot is missing.
    """
    return _Reader(location).table(read_document(content, location))


@dataclass(frozen=True)
class _Reader:
    location: str

    def table(self, document: Mapping[str, Any]) -> TableEncryption:
        keys: dict[str, EncryptionKey] = {}
        for number, item in enumerate(self.items(document, "encryption-keys")):
            entry = self.key(item, number)
            if entry.key_id in keys:
                raise KeyMaterialError(f"encryption-keys has {entry.key_id!r} twice", path=self.location)
            keys[entry.key_id] = entry
        current = document.get("current-snapshot-id")
        properties = document.get("properties") or {}
        if not isinstance(properties, dict):
            _refuse(self.location, "its properties are no object")
        statistics = [*self.items(document, "statistics"), *self.items(document, "partition-statistics")]
        table = TableEncryption(
            metadata_location=self.location,
            location=str(document.get("location", "")),
            table_uuid=str(document.get("table-uuid", "")),
            properties={str(name): str(value) for name, value in properties.items()},
            keys=keys,
            snapshots=tuple(map(self.snapshot, self.items(document, "snapshots"))),
            current_snapshot_id=current if type(current) is int and current != -1 else None,
            statistics=tuple(self.text(item, "statistics-path", "a statistics file") for item in statistics),
            earlier_metadata=tuple(
                self.text(item, "metadata-file", "the metadata log")
                for item in self.items(document, "metadata-log")
            ),
            document=document,
        )
        current_id = table.current_snapshot_id
        if table.is_encrypted and current_id is not None and table.snapshot(current_id) is None:
            # PyIceberg would show an empty table.
            raise KeyMaterialError(
                f"its current-snapshot-id is {current_id}, and it has no such snapshot",
                path=self.location,
                hint="Do not trust this metadata file; restore it from a backup.",
            )
        return table

    def key(self, item: Mapping[str, Any], number: int) -> EncryptionKey:
        what = f"entry {number} of encryption-keys"
        key_id = self.text(item, "key-id", what)
        try:
            encrypted = strict_base64.decode(self.text(item, "encrypted-key-metadata", what))
        except ValueError:
            encrypted = b""
        if not encrypted:
            raise KeyMaterialError(f"{what} ({key_id!r}): its key is not base64", path=self.location)
        properties = item.get("properties") or {}
        timestamp = properties.get(TIMESTAMP_PROPERTY) if isinstance(properties, dict) else None
        if timestamp is not None and not isinstance(timestamp, str):
            raise KeyMaterialError(f"{what} ({key_id!r}): {TIMESTAMP_PROPERTY} is no text", path=self.location)
        return EncryptionKey(key_id, encrypted, self.text(item, "encrypted-by-id", what), timestamp)

    def snapshot(self, item: Mapping[str, Any]) -> SnapshotKey:
        snapshot_id, timestamp = item.get("snapshot-id"), item.get("timestamp-ms", 0)
        if type(snapshot_id) is not int or type(timestamp) is not int:
            _refuse(self.location, "a snapshot has no id")
        key_id = item.get("key-id")
        if key_id is not None and not isinstance(key_id, str):
            raise KeyMaterialError(f"snapshot {snapshot_id}: its key-id is no text", path=self.location)
        # Snapshots of version 1 may list their manifests in place of a manifest list; those are never encrypted.
        manifest_list = item.get("manifest-list")
        return SnapshotKey(snapshot_id, str(manifest_list or ""), key_id, timestamp)

    def items(self, document: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
        items = document.get(name) or []
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            _refuse(self.location, f"its {name} are no list of objects")
        return items

    def text(self, item: Mapping[str, Any], name: str, what: str) -> str:
        value = item.get(name)
        if not isinstance(value, str) or not value:
            raise KeyMaterialError(f"{what} has no {name}", path=self.location)
        return value


def _refuse(location: str, reason: str) -> NoReturn:
    raise ParquetFormatError(f"{reason}.", path=location, hint="Check the location; or restore it from a backup.")


VERSION = 1
AAD_PREFIX_LENGTH = 16
"""Bytes of the AAD prefix of each file that is written; those that are read may have any length."""

_MAX_LENGTH = 1 << 16
_MAX_LONG = (1 << 63) - 1
_MAX_VARINT_LENGTH = 10
_NULL, _PRESENT = 0, 1


@dataclass(frozen=True)
class StandardKeyMetadata:
    """What opens one file of an encrypted table.

    Attributes:
        encryption_key: The DEK: 16, 24 or 32 bytes.
        aad_prefix: Begins the AAD of each block or module; empty where there is none.
        file_length: Bytes of the encrypted file, or None where the writer did not say.
    """

    encryption_key: SecretBytes
    aad_prefix: bytes = b""
    file_length: int | None = None

    @classmethod
    def fresh(cls, length_bits: int) -> StandardKeyMetadata:
        """Return a random DEK of `length_bits` bits, and a random AAD prefix, for a file that is to be written."""
        return cls(SecretBytes.random(length_bits), SecretBytes.random(AAD_PREFIX_LENGTH * 8).reveal())

    def encode(self) -> SecretBytes:
        """Return the bytes: they are as secret as the key in them."""
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
        """Return what the bytes say; the error says `what` they are of.

        Raises:
            KeyMaterialError: They are not key metadata of version 1, to the last byte. The error quotes none.
        """
        # What an exception's context holds would go into logs: nothing is raised from within a handler here.
        return _Decoder(encoded.reveal(), what).decode()


class _Decoder:
    def __init__(self, data: bytes, what: str) -> None:
        self._data = data
        self._what = what
        self._position = 0

    def decode(self) -> StandardKeyMetadata:
        if not self._data or len(self._data) > _MAX_LENGTH:
            raise self._error(f"it has {len(self._data)} bytes")
        version = self._data[0]
        if version != VERSION:
            raise self._error(
                f"it has version {version}, and only version {VERSION} is known",
                hint="A newer Iceberg wrote it, or it is that of another kind of encryption.",
            )
        self._position = 1
        key = SecretBytes(self._bytes("encryption_key"))
        if key.length_bits not in KEY_LENGTHS_BITS:
            raise self._error(f"its key has {key.length_bits} bits, not 128, 192 or 256")
        aad_prefix = self._bytes("aad_prefix") if self._is_present("aad_prefix") else b""
        file_length = self._long("file_length") if self._is_present("file_length") else None
        if file_length is not None and file_length < 0:
            raise self._error("its file_length is negative")
        if self._position != len(self._data):
            raise self._error(f"{len(self._data) - self._position} bytes follow its last field")
        return StandardKeyMetadata(key, aad_prefix, file_length)

    def _bytes(self, field: str) -> bytes:
        length = self._long(field)
        if not 0 <= length <= len(self._data) - self._position:
            raise self._error(f"its {field} does not end within it")
        self._position += length
        return self._data[self._position - length : self._position]

    def _is_present(self, field: str) -> bool:
        branch = self._long(field)
        if branch not in (_NULL, _PRESENT):
            raise self._error(f"its {field} is neither null nor a value")
        return branch == _PRESENT

    def _long(self, field: str) -> int:
        value = 0
        for index in range(_MAX_VARINT_LENGTH):
            if self._position == len(self._data):
                raise self._error(f"it ends within its {field}")
            byte = self._data[self._position]
            self._position += 1
            value |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:
                # One spelling for each number: bytes that were altered never mean the same.
                if (index and not byte) or value >> 64:
                    break
                return (value >> 1) ^ -(value & 1)
        raise self._error(f"its {field} has a number that Avro does not write")

    def _error(self, reason: str, *, hint: str = "") -> KeyMaterialError:
        return KeyMaterialError(
            f"the key metadata of {self._what} is not valid: {reason}.",
            hint=hint or "Do not trust this file; restore it, or the metadata that names it, from a backup.",
        )


def _encode_long(value: int) -> bytes:
    if not 0 <= value <= _MAX_LONG:
        raise ValueError(f"{value} is not a length")
    encoded = bytearray()
    rest = value << 1
    while rest >= 0x80:
        encoded.append(rest & 0x7F | 0x80)
        rest >>= 7
    encoded.append(rest)
    return bytes(encoded)
