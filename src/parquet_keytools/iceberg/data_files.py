"""A data file as plaintext: Parquet by modular encryption, under one key that Iceberg's key metadata holds."""

from __future__ import annotations

import time

import pyarrow as pa
from pyarrow import fs as pafs

from parquet_keytools.encryption.file_decryptor import decrypt_columns
from parquet_keytools.encryption.footer import Footer, FooterEnvelope, read_envelope
from parquet_keytools.encryption.protection import Algorithm, ColumnEncryption, FooterMode
from parquet_keytools.encryption.stated_algorithm import check_stated_algorithm
from parquet_keytools.errors import DecryptionError, KeyMaterialError, NotEncryptedError
from parquet_keytools.files.opened_file import OpenedFile, VerifiedTail, naming_place
from parquet_keytools.format.byte_ranges import ByteSource, RangedFile
from parquet_keytools.iceberg.ags1 import Ags1Reader
from parquet_keytools.iceberg.key_metadata import StandardKeyMetadata
from parquet_keytools.keys.file_key_retriever import DataKeys, FileKeyRetriever
from parquet_keytools.keys.key_wrapping import KeyUnwrapper, KmsKeys
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.outputs import BufferSink
from parquet_keytools.view.page_cache import PageCache
from parquet_keytools.view.plain_file import PlainFile

_ARROW_READS_OF_THE_END = 64 * 1024
"""Bytes at the end of a file that Arrow reads at once, for a footer that is mostly far shorter."""


def check_length(length: int, key: StandardKeyMetadata, listed_length: int | None, name: str) -> None:
    """Compare the length of a file with what the chain says, before a byte of it is decrypted.

    Raises:
        DecryptionError: It has another length.
    """
    for source, expected in (("its key metadata", key.file_length), ("the manifest", listed_length)):
        if expected is not None and length != expected:
            raise DecryptionError(
                f"the {name} has {length} bytes, and {source} says {expected}: it is another file, or was cut.",
                hint="Do not trust this file; restore it from a backup.",
            )


def read_stream(stored: pa.NativeFile, key: StandardKeyMetadata, listed_length: int | None, name: str) -> bytes:
    """Return the plaintext of an AGS1 stream.

    Args:
        stored: The file; the reader closes it.
        key: Its key metadata.
        listed_length: Its bytes, as the file above it lists them.
        name: What errors call it.

    Raises:
        DecryptionError: It has another length, or a block of it does not authenticate.
        NotEncryptedError: It is plaintext.
    """
    check_length(stored.size(), key, listed_length, name)
    with Ags1Reader(stored, key, path=f"the {name}") as reader:
        return reader.read()


def open_data_file(source: ByteSource, key: StandardKeyMetadata, name: str, cache: PageCache) -> PlainFile:
    """Open a Parquet file as plaintext: pages are decrypted when they are read.

    Args:
        source: The file; it stays open as long as the view is read.
        key: Its key metadata in Iceberg.
        name: What errors call it.
        cache: Keeps pages that were decrypted.

    Raises:
        NotEncryptedError: It is plaintext.
        DecryptionError: Its footer does not authenticate, or it is not encrypted as Iceberg encrypts.
        KeytoolsError: Another subclass says what is wrong with it.
    """
    footer, envelope = _open_footer(source, key, name)
    location = _named(name)
    kms_keys = KmsKeys(KeyUnwrapper(None, time.monotonic), 0)
    retriever = FileKeyRetriever(kms_keys, DataKeys(), location)
    opened = OpenedFile(location, footer, VerifiedTail.of(envelope), retriever, kms_keys, {}, {})
    with naming_place(location, footer.columns):
        check_stated_algorithm(source, footer, {})
    return PlainFile(opened, source, "error", cache, gap=_ARROW_READS_OF_THE_END)


def decrypt_data_file(source: ByteSource, key: StandardKeyMetadata, name: str) -> pa.Buffer:
    """Return a Parquet file in plaintext, every module of it checked.

    Raises:
        KeytoolsError: As with `open_data_file`, or one of its modules does not authenticate.
    """
    footer, _ = _open_footer(source, key, name)
    sink = BufferSink()
    with naming_place(_named(name), footer.columns):
        decrypt_columns(source, sink, footer, {})
    return pa.py_buffer(sink.buffer)


def _named(name: str) -> FileLocation:
    """Return a name for errors: of the place itself, all that is known is the stream that PyIceberg opened."""
    return FileLocation(pafs.LocalFileSystem(), f"the {name}")


def _open_footer(source: ByteSource, key: StandardKeyMetadata, name: str) -> tuple[Footer, FooterEnvelope]:
    envelope = read_envelope(source)
    if envelope.mode is FooterMode.UNENCRYPTED:
        raise NotEncryptedError(
            f"the {name} is plaintext, and it has the key metadata of an encrypted one.",
            hint="Do not trust this file: somebody replaced it.",
        )
    if envelope.mode is not FooterMode.ENCRYPTED_FOOTER or envelope.algorithm is not Algorithm.AES_GCM_V1:
        raise DecryptionError(
            f"the {name} is not encrypted as Iceberg does it, with AES_GCM_V1 and an encrypted footer.",
            hint="Do not trust this file: somebody replaced it.",
        )
    if envelope.key_metadata is not None:
        raise KeyMaterialError(
            f"the {name} has key metadata of its own, and Iceberg has its key in the manifest.",
            hint="Another writer than Iceberg's made it. Do not trust this file.",
        )
    with naming_place(_named(name)):
        footer = envelope.open(key.encryption_key, key.aad_prefix or None)
    if (
        any(column.encryption is not ColumnEncryption.FOOTER_KEY for column in footer.columns)
        and footer.row_groups
    ):
        raise DecryptionError(
            f"the {name} has columns in plaintext or under keys of their own, and Iceberg has one key for all.",
            hint="Do not trust this file: somebody replaced it.",
        )
    return footer, envelope


class UncopiedInput(RangedFile):
    """A plaintext view for Arrow alone, which takes any buffer for the bytes that it reads.

    The stored file is closed when nobody has the view any more.
    """

    def __init__(self, file: PlainFile) -> None:
        super().__init__()
        self._file = file
        self.size_bytes = file.size_bytes

    def read_at(self, offset: int, length: int) -> bytes:
        """Return a range of the view."""
        return self._file.read_at(offset, length) if length else b""

    read = RangedFile.read_uncopied  # type: ignore[assignment]
