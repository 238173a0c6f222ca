"""Files in memory, and data keys by name, for tests of the module encryptor."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from parquet_keytools.encryption.aad import AadPrefix
from parquet_keytools.encryption.file_encryption import (
    Deks,
    FileEncryption,
    column_deks,
    decrypt_columns,
    encrypt_opened,
    encrypt_source,
)
from parquet_keytools.encryption.footer import Footer, read_footer
from parquet_keytools.encryption.protection import FooterMode, KeyRetriever
from parquet_keytools.errors import (
    KeyNotAvailableError,
    KeytoolsError,
    NotEncryptedError,
    ParquetFormatError,
)
from parquet_keytools.format.file_layout import ByteSink, ByteSource
from parquet_keytools.secret_bytes import SecretBytes


class MemorySource:
    """A file in memory that records which ranges were read."""

    def __init__(self, data: bytes | bytearray, path: str = "memory.parquet") -> None:
        self.path = path
        self.data = memoryview(bytes(data))
        self.reads: list[tuple[int, int]] = []

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def read_at(self, offset: int, length: int) -> memoryview:
        if offset < 0 or length < 0 or offset + length > len(self.data):
            raise ParquetFormatError(f"{length} bytes at {offset} are outside of the file", path=self.path)
        self.reads.append((offset, length))
        return self.data[offset : offset + length]


class MemorySink:
    """A file in memory that checks that every byte is written once."""

    def __init__(self, *, takes_any_order: bool = True) -> None:
        self.takes_any_order = takes_any_order
        self.data = bytearray()
        self.written_bytes = 0
        self.reserved_bytes: int | None = None
        self._lock = threading.Lock()

    def reserve(self, length: int) -> None:
        assert self.reserved_bytes is None and not self.written_bytes
        self.reserved_bytes = length
        self.data = bytearray(length)

    def write_at(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        assert self.reserved_bytes is not None and offset + len(data) <= self.reserved_bytes
        assert self.takes_any_order or offset == self.written_bytes
        self.data[offset : offset + len(data)] = data
        with self._lock:
            self.written_bytes += len(data)

    def contents(self) -> bytes:
        assert self.written_bytes == self.reserved_bytes
        return bytes(self.data)


@dataclass
class NamedKeys:
    """A key retriever whose key metadata is the name of a key."""

    deks: dict[bytes | None, SecretBytes] = field(default_factory=dict)

    def new(self, name: bytes, length_bits: int = 128) -> SecretBytes:
        self.deks[name] = SecretBytes.random(length_bits)
        return self.deks[name]

    def footer_dek(self, key_metadata: bytes | None) -> SecretBytes:
        if key_metadata not in self.deks:
            raise KeyNotAvailableError("no such key")
        return self.deks[key_metadata]

    def column_deks(
        self, columns: Sequence[tuple[tuple[str, ...], bytes | None]]
    ) -> list[SecretBytes | KeytoolsError]:
        return [self.deks.get(key_metadata) or KeyNotAvailableError("no such key") for _, key_metadata in columns]


def encrypted(data: bytes, encryption: FileEncryption) -> bytes:
    """Return an encrypted file."""
    sink = MemorySink()
    encrypt_source(MemorySource(data), sink, encryption)
    return sink.contents()


def decrypt_source(
    source: ByteSource,
    sink: ByteSink,
    keys: KeyRetriever,
    aad_prefix: AadPrefix = None,
    *,
    threads: int = 2,
) -> None:
    """Decrypt a whole encrypted file with the functions that `Keytools.decrypt_file` calls."""
    footer, deks = opened(source, keys, aad_prefix)
    decrypt_columns(source, sink, footer, deks, threads=threads)


def rekey_source(
    source: ByteSource,
    sink: ByteSink,
    keys: KeyRetriever,
    encryption: FileEncryption,
    aad_prefix: AadPrefix = None,
    *,
    threads: int = 2,
) -> None:
    """Re-encrypt a file under other keys with the functions that `Keytools.rekey_file` calls."""
    footer, deks = opened(source, keys, aad_prefix)
    encrypt_opened(source, sink, footer, deks, encryption, threads=threads)


def opened(source: ByteSource, keys: KeyRetriever, aad_prefix: AadPrefix) -> tuple[Footer, Deks]:
    """Open an encrypted file; return its footer, and the DEKs of the columns that have their own."""
    footer = read_footer(source, keys, aad_prefix)
    if footer.mode is FooterMode.UNENCRYPTED:
        raise NotEncryptedError(f"{source.path} is not encrypted.")
    return footer, column_deks(footer, keys)


def decrypted(data: bytes, keys: NamedKeys, aad_prefix: bytes | None = None) -> bytes:
    """Return a decrypted file."""
    sink = MemorySink()
    decrypt_source(MemorySource(data), sink, keys, aad_prefix)
    return sink.contents()
