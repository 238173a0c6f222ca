"""A data file as plaintext: Parquet by modular encryption, under one key that Iceberg's key metadata holds."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from parquet_keytools.encryption.file_decryptor import column_deks, decrypt_columns
from parquet_keytools.encryption.footer import read_envelope
from parquet_keytools.encryption.protection import Algorithm, FooterMode
from parquet_keytools.errors import (
    DecryptionError,
    KeyMaterialError,
    KeyNotAvailableError,
    KeytoolsError,
    NotEncryptedError,
)
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.iceberg.ags1 import Ags1Reader
from parquet_keytools.iceberg.key_metadata import StandardKeyMetadata
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.outputs import BufferSink


class UniformKey:
    """A `KeyRetriever` for a file that is under one key as a whole, as all Parquet files of Iceberg are."""

    def __init__(self, dek: SecretBytes) -> None:
        self._dek = dek

    def footer_dek(self, key_metadata: bytes | None) -> SecretBytes:
        """Return the key; Iceberg's files carry no key metadata of Parquet."""
        if key_metadata is not None:
            raise KeyMaterialError(
                "the file has key metadata of its own, and Iceberg has its key in the manifest.",
                hint="Another writer than Iceberg's made it. Do not trust this file.",
            )
        return self._dek

    def column_deks(
        self, columns: Sequence[tuple[tuple[str, ...], bytes | None]]
    ) -> list[SecretBytes | KeytoolsError]:
        """Return an error for each: no column of such a file has a key of its own."""
        return [
            KeyNotAvailableError("Iceberg has one key for a file, and this column has another.") for _ in columns
        ]


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


def decrypt_data_file(source: ByteSource, key: StandardKeyMetadata, name: str) -> pa.Buffer:
    """Return a Parquet file in plaintext.

    Args:
        source: The file.
        key: Its key metadata in Iceberg.
        name: What errors call it.

    Raises:
        NotEncryptedError: It is plaintext.
        DecryptionError: A part of it does not authenticate, or it is not encrypted as Iceberg encrypts.
        KeytoolsError: Another subclass says what is wrong with it.
    """
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
    retriever = UniformKey(key.encryption_key)
    sink = BufferSink()
    footer = envelope.open(retriever.footer_dek(envelope.key_metadata), key.aad_prefix or None)
    decrypt_columns(source, sink, footer, column_deks(footer, retriever))
    return pa.py_buffer(sink.buffer)
