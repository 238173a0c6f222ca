"""Whole files encrypted or re-keyed, without decoding a value."""

from __future__ import annotations

from collections.abc import Callable

from parquet_keytools.encryption.aad import MAX_COUNT
from parquet_keytools.encryption.aad_prefix import AadPrefix
from parquet_keytools.encryption.envelope import naming_file
from parquet_keytools.encryption.file_decryptor import Deks, column_deks, open_chunks
from parquet_keytools.encryption.file_encryption import FileEncryption, OutputKeys
from parquet_keytools.encryption.file_rewriter import new_row_group, rewrite_file
from parquet_keytools.encryption.footer import Footer, FooterEnvelope, open_footer, read_envelope
from parquet_keytools.encryption.key_retriever import KeyRetriever
from parquet_keytools.encryption.protection import FooterMode
from parquet_keytools.encryption.stated_algorithm import check_stated_algorithm
from parquet_keytools.errors import AlreadyEncryptedError, FormatLimitError, NotEncryptedError
from parquet_keytools.format.byte_ranges import ByteSink, ByteSource
from parquet_keytools.format.collector import paused_for
from parquet_keytools.format.file_layout import (
    MAGIC,
    MAGIC_ENCRYPTED_FOOTER,
    read_footer_bytes,
    unauthenticated_limit,
)
from parquet_keytools.format.structs import FileMetaData
from parquet_keytools.format.thrift_values import Struct


def encrypt_source(
    source: ByteSource,
    sink: ByteSink,
    encryption: FileEncryption,
    *,
    threads: int = 2,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Encrypt a plaintext file.

    Args:
        source: The file.
        sink: Where the encrypted file goes.
        encryption: How to encrypt it.
        threads: How many threads work.
        on_progress: Called with the number of bytes after each write, by any of the threads.

    Raises:
        AlreadyEncryptedError: The file is encrypted.
        ParquetFormatError: The file is not what the format says, or a page is damaged.
        FormatLimitError: The output would break a limit of the format; nothing was written then.
        ConfigurationError: A key is given for a column that the file does not have.
    """
    footer = read_plaintext_footer(source)
    encrypt_opened(source, sink, footer, {}, encryption, threads=threads, on_progress=on_progress)


def read_plaintext_footer(source: ByteSource) -> Footer:
    """Read the footer of a file that is not encrypted.

    All of it is read at once, where `read_envelope` only skims it: there is nothing to authenticate before.

    Raises:
        AlreadyEncryptedError: The file is encrypted.
        ParquetFormatError: As `read_envelope` and `FooterEnvelope.open`.
    """
    footer = read_footer_bytes(source)
    read = None
    with naming_file(source.path):
        if not footer.is_encrypted:
            data = footer.data
            read = FileMetaData.read(data, max_memory=unauthenticated_limit(len(data)))
        envelope = FooterEnvelope.of(footer, source.path, read)
    if read is None or envelope.mode is not FooterMode.UNENCRYPTED:
        raise AlreadyEncryptedError(
            f"{source.path} is encrypted already.", hint="Use rekey to encrypt it with other keys."
        )
    return envelope.with_metadata(read[0], None, b"")


def rekey_source(
    source: ByteSource,
    sink: ByteSink,
    retriever: KeyRetriever,
    encryption: FileEncryption,
    aad_prefix: AadPrefix = None,
    *,
    threads: int = 2,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Decrypt an encrypted file and encrypt it with other keys, or in another way, in one pass.

    Args:
        source: The file.
        sink: Where the new file goes.
        retriever: Where the file's DEKs come from.
        encryption: How to encrypt it now.
        aad_prefix: The prefix that is expected of the source, or None to take what it stores.
        threads: How many threads work.
        on_progress: Called with the number of bytes after each write, by any of the threads.

    Raises:
        NotEncryptedError: The file is not encrypted.
        DecryptionError: A part of it does not authenticate.
        ParquetFormatError: It is not what the format says, or a page is damaged.
        FormatLimitError: The output would break a limit of the format; nothing was written then.
        ColumnAccessDeniedError: Keys of columns are unavailable.
        ConfigurationError: A key is given for a column that the file does not have.
    """
    envelope = read_envelope(source)
    if envelope.mode is FooterMode.UNENCRYPTED:
        raise NotEncryptedError(f"{source.path} is not encrypted.", hint="Use encrypt for it.")
    footer = open_footer(envelope, retriever, aad_prefix)
    encrypt_opened(
        source,
        sink,
        footer,
        column_deks(footer, retriever),
        encryption,
        threads=threads,
        on_progress=on_progress,
    )


def encrypt_opened(
    source: ByteSource,
    sink: ByteSink,
    footer: Footer,
    deks: Deks,
    encryption: FileEncryption,
    *,
    threads: int = 2,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Encrypt a file whose footer is open: a plaintext file, or an encrypted one with other keys.

    Args:
        source: The file that the footer is from.
        sink: Where the new file goes.
        footer: Its footer.
        deks: DEKs of the columns that have a column key.
        encryption: How to encrypt it.
        threads: How many threads work.
        on_progress: Called with the number of bytes after each write, by any of the threads.

    Raises:
        KeytoolsError: As `rekey_source`.
    """
    with paused_for(source.size_bytes):
        _encrypt(source, sink, footer, deks, encryption, threads, on_progress)


def _encrypt(
    source: ByteSource,
    sink: ByteSink,
    footer: Footer,
    deks: Deks,
    encryption: FileEncryption,
    threads: int,
    on_progress: Callable[[int], None] | None,
) -> None:
    if max(len(footer.row_groups), len(footer.leaves)) > MAX_COUNT:
        raise FormatLimitError(
            f"{source.path}: {len(footer.row_groups)} row groups of {len(footer.leaves)} columns are more than an "
            f"encrypted file can have: at most {MAX_COUNT} of each.",
            hint="Write fewer into one file.",
        )
    check_stated_algorithm(source, footer, deks)
    keys = OutputKeys(encryption, footer.leaves)
    row_groups = open_chunks(footer, deks, keys.writer_of)

    def make_footer() -> bytes:
        new_row_groups = []
        for ordinal, (row_group, chunks) in enumerate(row_groups):
            columns: list[bytes | Struct] = [
                keys.protected(chunk, column_ordinal) for column_ordinal, chunk in enumerate(chunks)
            ]
            new_row_groups.append(new_row_group(ordinal, row_group, chunks, columns))
        return keys.footer(footer, new_row_groups)

    rewrite_file(
        source,
        sink,
        row_groups,
        footer_offset=footer.envelope.footer_offset,
        created_by=footer.metadata.created_by,
        magic=MAGIC if encryption.plaintext_footer else MAGIC_ENCRYPTED_FOOTER,
        make_footer=make_footer,
        threads=threads,
        on_progress=on_progress,
    )
