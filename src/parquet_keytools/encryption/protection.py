"""How a file and each of its columns are protected, as it says before any key is used (spec 4.2, 5.2 to 5.5)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, Self

from parquet_keytools.encryption.aad import MAX_COUNT
from parquet_keytools.errors import KeytoolsError, ParquetFormatError
from parquet_keytools.format.file_layout import (
    FooterBytes,
    LeafColumn,
    leaf_columns,
    refuse_draft_crypto_metadata,
    refuse_draft_footer,
)
from parquet_keytools.format.structs import (
    Aes,
    ColumnChunk,
    EncryptionAlgorithm,
    FileCryptoMetaData,
    FileMetaData,
    Records,
    RowGroup,
    usual_key_metadata,
)
from parquet_keytools.format.thrift import WireType, read_struct
from parquet_keytools.secret_bytes import SecretBytes


class FooterMode(Enum):
    """How the footer of a file is protected."""

    UNENCRYPTED = "unencrypted"
    PLAINTEXT_FOOTER = "plaintext footer"
    ENCRYPTED_FOOTER = "encrypted footer"


class Algorithm(Enum):
    """Encryption algorithm of a file (spec 4.2)."""

    AES_GCM_V1 = "AES_GCM_V1"
    AES_GCM_CTR_V1 = "AES_GCM_CTR_V1"


class ColumnEncryption(Enum):
    """What a column is encrypted with."""

    PLAINTEXT = "plaintext"
    FOOTER_KEY = "footer key"
    COLUMN_KEY = "column key"


@dataclass(frozen=True, slots=True)
class FooterColumn:
    """A leaf column of a file; PLAINTEXT also where the file has no row group. Key metadata is of its own key."""

    path: tuple[str, ...]
    ordinal: int
    encryption: ColumnEncryption
    key_metadata: bytes | None


def leaves_of(metadata: FileMetaData) -> tuple[LeafColumn, ...]:
    """Return the leaves of the schema of a footer; see `leaf_columns`."""
    written = metadata.bytes_of(FileMetaData.schema)
    if written is None or len(written) > _USUAL_SCHEMA_BYTES:
        return leaf_columns(metadata.schema)
    return _leaves_of_written(written)


_USUAL_SCHEMA_BYTES = 64 * 1024


@functools.lru_cache(maxsize=16)
def _leaves_of_written(schema: bytes) -> tuple[LeafColumn, ...]:
    """Return the leaves of a schema, given as type and bytes of its field: thousands of files have the same."""
    field_header = FileMetaData.schema.field_id << 4 | schema[0]
    metadata = FileMetaData(read_struct(bytes((field_header,)) + schema[1:] + b"\0")[0])
    return leaf_columns(metadata.schema)


def columns_of(
    leaves: tuple[LeafColumn, ...],
    row_groups: list[RowGroup],
    chunks: Sequence[Sequence[ColumnChunk]],
    is_encrypted: bool,
) -> tuple[FooterColumn, ...]:
    """Return how each column is encrypted in the first row group; see `check_chunk` for the others."""
    if is_encrypted and max(len(leaves), len(row_groups)) > MAX_COUNT:
        raise ParquetFormatError("an encrypted file has more row groups or columns than ordinals (spec 4.4.2).")
    for ordinal, (row_group, these) in enumerate(zip(row_groups, chunks, strict=True)):
        if is_encrypted and row_group.ordinal not in (None, ordinal):
            raise ParquetFormatError(f"row group {ordinal} says that its ordinal is {row_group.ordinal}.")
        if len(these) != len(leaves):
            raise ParquetFormatError(
                f"row group {ordinal} has {len(these)} chunks for {len(leaves)} leaf columns."
            )
    if chunks:
        first = chunks[0].passing() if isinstance(chunks[0], Records) else chunks[0]
        columns = [_column_of(leaf, chunk) for leaf, chunk in zip(leaves, first, strict=True)]
    else:
        columns = [FooterColumn(leaf.path, leaf.ordinal, ColumnEncryption.PLAINTEXT, None) for leaf in leaves]
    if not is_encrypted and any(column.encryption is not ColumnEncryption.PLAINTEXT for column in columns):
        raise ParquetFormatError(
            "columns are encrypted, and the footer names no encryption algorithm.",
            hint="The field was removed from the footer, and with it the signature; restore the file.",
        )
    return tuple(columns)


def check_chunk(row_group_ordinal: int, leaf: LeafColumn, chunk: ColumnChunk, column: FooterColumn) -> None:
    """Raise `ParquetFormatError` unless a chunk is encrypted as the first chunk of its column is."""
    if _column_of(leaf, chunk) != column:
        raise ParquetFormatError(
            f"row group {row_group_ordinal}: column {leaf.dotted_path!r} is encrypted in another way than before."
        )


def _column_of(leaf: LeafColumn, chunk: ColumnChunk) -> FooterColumn:
    stored = chunk.struct.entry_bytes(ColumnChunk.crypto_metadata.field_id)
    if stored is not None and stored[0] is WireType.STRUCT:
        key_metadata = usual_key_metadata(stored[1], leaf.path)
        if key_metadata is not None:
            return FooterColumn(leaf.path, leaf.ordinal, ColumnEncryption.COLUMN_KEY, key_metadata)
    crypto = chunk.crypto_metadata
    if crypto is None:
        if chunk.encrypted_column_metadata is not None:
            raise ParquetFormatError(
                f"column {leaf.dotted_path!r} has encrypted metadata, and does not say with which key (spec 5.2).",
                hint="The field crypto_metadata was removed or altered; restore the file.",
            )
        return FooterColumn(leaf.path, leaf.ordinal, ColumnEncryption.PLAINTEXT, None)
    if len(crypto.struct.ids()) == 1:
        with_column_key = crypto.encryption_with_column_key
        if with_column_key is not None:
            if not with_column_key.has_path(leaf.path):
                raise ParquetFormatError(f"column {leaf.dotted_path!r} has the crypto metadata of another one.")
            return FooterColumn(leaf.path, leaf.ordinal, ColumnEncryption.COLUMN_KEY, with_column_key.key_metadata)
        if crypto.encryption_with_footer_key is not None:
            return FooterColumn(leaf.path, leaf.ordinal, ColumnEncryption.FOOTER_KEY, None)
    raise ParquetFormatError(f"column {leaf.dotted_path!r}: its crypto metadata is not valid (spec 5.2).")


class UnknownAlgorithmError(ParquetFormatError):
    """The union of encryption algorithms does not hold exactly one known one."""


@dataclass(frozen=True)
class Envelope:
    """What a file says before any key is used; nothing of it is authenticated, so decide by it only which key.

    With an encrypted footer, no key ever authenticates the algorithm (spec 5.4): callers that refuse CTR compare
    it with what they expect. `footer_length` is of all that the footer's length covers. `body` is the module of an
    encrypted footer, or a serialised plaintext footer, and `signature` what follows it. `tail` is the file from
    the footer on: take its bytes from here, because another read may find another file there.
    """

    path: str
    mode: FooterMode
    algorithm: Algorithm | None
    aad_prefix: bytes | None
    aad_file_unique: bytes | None
    supply_aad_prefix: bool
    key_metadata: bytes | None
    footer_offset: int
    footer_length: int
    body: memoryview = field(repr=False)
    signature: bytes = field(repr=False)
    tail: bytes = field(repr=False)

    @classmethod
    def of(cls, footer: FooterBytes, path: str, read: tuple[FileMetaData, int] | None = None) -> Self:
        """Return the envelope in the bytes of a footer; `read` is a plaintext footer read before, and its end."""
        data = footer.data
        if footer.is_encrypted:
            crypto, end = FileCryptoMetaData.read(data)
            refuse_draft_crypto_metadata(crypto)
            algorithm, parameters = _algorithm_of(crypto.encryption_algorithm)
            mode, key_metadata = FooterMode.ENCRYPTED_FOOTER, crypto.key_metadata
            body, signature = data[end:], b""
        else:
            protection, end = read or FileMetaData.read_outline(data)
            refuse_draft_footer(protection)
            body, signature = data[:end], bytes(data[end:])
            key_metadata = protection.footer_signing_key_metadata
            mode, algorithm, parameters = FooterMode.UNENCRYPTED, None, Aes()
            stored = protection.encryption_algorithm
            if stored is not None:
                mode = FooterMode.PLAINTEXT_FOOTER
                algorithm, parameters = _algorithm_of(stored)
        return cls(
            path=path,
            mode=mode,
            algorithm=algorithm,
            # An empty prefix is none: some writers store the field empty.
            aad_prefix=parameters.aad_prefix or None,
            aad_file_unique=parameters.aad_file_unique,
            supply_aad_prefix=bool(parameters.supply_aad_prefix),
            key_metadata=key_metadata,
            footer_offset=footer.offset,
            footer_length=len(data),
            body=body,
            signature=signature,
            tail=footer.tail,
        )


def _algorithm_of(stored: EncryptionAlgorithm) -> tuple[Algorithm, Aes]:
    gcm, ctr = stored.aes_gcm_v1, stored.aes_gcm_ctr_v1
    if gcm is not None and len(stored.struct.types()) == 1:
        return Algorithm.AES_GCM_V1, gcm
    if ctr is not None and len(stored.struct.types()) == 1:
        return Algorithm.AES_GCM_CTR_V1, ctr
    raise UnknownAlgorithmError("the encryption algorithm is none of AES_GCM_V1 and AES_GCM_CTR_V1 (spec 5.2).")


@contextlib.contextmanager
def naming_file(path: str) -> Iterator[None]:
    """Name a file in errors about its format."""
    try:
        yield
    except ParquetFormatError as error:
        if error.path is not None:
            raise
        kind = ParquetFormatError if isinstance(error, UnknownAlgorithmError) else type(error)
        raise kind(str(error), path=path) from None


class KeyRetriever(Protocol):
    """Finds the DEK that key metadata stands for (spec 4.3)."""

    def footer_dek(self, key_metadata: bytes | None) -> SecretBytes:
        """Return the DEK of the footer, or raise the error that says why it is unavailable."""
        ...

    def column_deks(
        self, columns: Sequence[tuple[tuple[str, ...], bytes | None]]
    ) -> list[SecretBytes | KeytoolsError]:
        """Return, in order, the DEKs of columns by path and key metadata, or the errors; asked for together."""
        ...
