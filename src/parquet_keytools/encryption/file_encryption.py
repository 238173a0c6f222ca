"""How a file is to be encrypted: keys, mode, algorithm; and what its footer says and shows (spec 5.2 to 5.5)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from parquet_keytools.encryption.aad import FOOTER_PLACE, ModuleType, random_file_unique
from parquet_keytools.encryption.file_rewriter import ChunkRewrite
from parquet_keytools.encryption.footer import Footer
from parquet_keytools.encryption.module_cipher import MAX_INVOCATIONS, ChunkCipher, ModuleCipher
from parquet_keytools.encryption.protection import Algorithm, ColumnEncryption
from parquet_keytools.errors import ConfigurationError, VisibleMetadataError
from parquet_keytools.format.file_layout import LeafColumn
from parquet_keytools.format.partial_footers import (
    hidden_chunk_fields,
    shown_footer,
    shown_metadata,
    shown_row_group,
)
from parquet_keytools.format.schema_key_values import VisibleKeyValues
from parquet_keytools.format.structs import (
    Aes,
    ColumnChunk,
    ColumnCryptoMetaData,
    ColumnMetaData,
    EncryptionAlgorithm,
    EncryptionWithColumnKey,
    EncryptionWithFooterKey,
    FileCryptoMetaData,
    FileMetaData,
    KeyValue,
    RowGroup,
)
from parquet_keytools.format.thrift import Entry, WireType
from parquet_keytools.secret_bytes import SecretBytes

_STRUCT, _BINARY = WireType.STRUCT, WireType.BINARY
_FOOTER_KEY, _COLUMN_META_DATA = ColumnEncryption.FOOTER_KEY, ModuleType.COLUMN_META_DATA
_META_DATA = ColumnChunk.meta_data.field_id
_CRYPTO_METADATA = ColumnChunk.crypto_metadata.field_id
_ENCRYPTED_COLUMN_METADATA = ColumnChunk.encrypted_column_metadata.field_id

_log = logging.getLogger(__name__)

_INDEXES = (
    (ColumnChunk.offset_index_offset.field_id, ColumnChunk.offset_index_length.field_id),
    (ColumnChunk.column_index_offset.field_id, ColumnChunk.column_index_length.field_id),
)

_MOST_NAMED = 20
"""How many hidden things a message names."""


@dataclass(frozen=True)
class ColumnKey:
    """The key of a column.

    Attributes:
        dek: The DEK.
        key_metadata: What the file carries for it (spec 4.3), or None for nothing.
    """

    dek: SecretBytes
    key_metadata: bytes | None = None


KeyChoice = ColumnKey | Literal[ColumnEncryption.FOOTER_KEY, ColumnEncryption.PLAINTEXT]


@dataclass(frozen=True)
class FileEncryption:
    """How one file is encrypted. For every file a new one: its file unique, and best its DEKs, are its own.

    Attributes:
        footer_dek: Encrypts or signs the footer.
        footer_key_metadata: What the file carries for it, or None for nothing.
        columns: Path of a leaf column -> its key.
        unlisted_columns: What columns are encrypted with that are not in `columns`.
        algorithm: AES_GCM_CTR_V1 does not authenticate pages.
        plaintext_footer: Whether the footer is signed only, so that readers without keys can use it.
        aad_prefix: Binds the file to its identity (spec 4.4.1), or None.
        store_aad_prefix: Whether the file carries the prefix; else its readers must supply it.
        aad_file_unique: Random bytes of this file.
        invocation_limit: How often one key may encrypt in this file.
        visible_key_values: Which key-value metadata of the file a plaintext footer shows.
    """

    footer_dek: SecretBytes
    footer_key_metadata: bytes | None = None
    columns: Mapping[tuple[str, ...], KeyChoice] = field(default_factory=dict)
    unlisted_columns: Literal[ColumnEncryption.FOOTER_KEY, ColumnEncryption.PLAINTEXT] = (
        ColumnEncryption.FOOTER_KEY
    )
    algorithm: Algorithm = Algorithm.AES_GCM_V1
    plaintext_footer: bool = False
    aad_prefix: bytes | None = None
    store_aad_prefix: bool = True
    aad_file_unique: bytes = field(default_factory=random_file_unique)
    invocation_limit: int = MAX_INVOCATIONS
    visible_key_values: VisibleKeyValues = field(default_factory=VisibleKeyValues)

    @property
    def file_aad(self) -> bytes:
        """AAD prefix and file unique, which begin the AAD of every module."""
        return (self.aad_prefix or b"") + self.aad_file_unique

    @property
    def deks(self) -> list[tuple[SecretBytes, bytes | None]]:
        """The footer's DEK, and those of columns that have one of their own, each with its key metadata."""
        of_columns = [(key.dek, key.key_metadata) for key in self.columns.values() if isinstance(key, ColumnKey)]
        return [(self.footer_dek, self.footer_key_metadata), *of_columns]

    def keys_of(self, leaves: Sequence[LeafColumn]) -> list[KeyChoice]:
        """Return the key of each leaf column of a file.

        Raises:
            ConfigurationError: A listed column is none of them.
        """
        unknown = set(self.columns) - {leaf.path for leaf in leaves}
        if unknown:
            names = ", ".join(repr(".".join(path)) for path in sorted(unknown))
            raise ConfigurationError(f"keys are given for columns that the file does not have: {names}.")
        return [self.columns.get(leaf.path, self.unlisted_columns) for leaf in leaves]

    def stored_algorithm(self) -> EncryptionAlgorithm:
        """Return the structure that says all this to readers (spec 5.2)."""
        parameters = Aes()
        if self.aad_prefix and self.store_aad_prefix:
            parameters.aad_prefix = self.aad_prefix
        parameters.aad_file_unique = self.aad_file_unique
        if self.aad_prefix and not self.store_aad_prefix:
            parameters.supply_aad_prefix = True
        stored = EncryptionAlgorithm()
        if self.algorithm is Algorithm.AES_GCM_V1:
            stored.aes_gcm_v1 = parameters
        else:
            stored.aes_gcm_ctr_v1 = parameters
        return stored


class OutputKeys:
    """The ciphers of a file that is being encrypted: one for each DEK, so that each counts its invocations.

    Attributes:
        encryption: How the file is encrypted.
        column_keys: The key of each leaf column.
        footer_cipher: Under the footer's DEK.
        column_ciphers: For each leaf column; None where it stays plaintext.
    """

    def __init__(self, encryption: FileEncryption, leaves: Sequence[LeafColumn]) -> None:
        """Make them for a file with these leaf columns.

        Raises:
            ConfigurationError: A key is given for a column that is not among them.
        """
        self.encryption = encryption
        self.column_keys = encryption.keys_of(leaves)
        self._ciphers: dict[bytes, ModuleCipher] = {}
        self.footer_cipher = self._cipher_of(encryption.footer_dek)
        self.column_ciphers = [self._column_cipher(key) for key in self.column_keys]
        keys = self.column_keys
        encrypted = [ordinal for ordinal, key in enumerate(keys) if key is not ColumnEncryption.PLAINTEXT]
        self._plaintext_footer = PlaintextFooterMaker(encryption.visible_key_values, encrypted)
        # The same in every row group.
        self._crypto_metadata = [_crypto_metadata(key, leaf.path) for key, leaf in zip(keys, leaves, strict=True)]

    def _column_cipher(self, key: KeyChoice) -> ModuleCipher | None:
        if isinstance(key, ColumnKey):
            return self._cipher_of(key.dek)
        return self.footer_cipher if key is ColumnEncryption.FOOTER_KEY else None

    def _cipher_of(self, dek: SecretBytes) -> ModuleCipher:
        # The very bytes that the DEK holds, no copy: gone with the ciphers, which hold the DEK.
        cipher = self._ciphers.get(dek.reveal())
        if cipher is None:
            encryption = self.encryption
            cipher = ModuleCipher(dek, encryption.file_aad, invocation_limit=encryption.invocation_limit)
            self._ciphers[dek.reveal()] = cipher
        return cipher

    def writer_of(self, row_group_ordinal: int, column_ordinal: int) -> ChunkCipher | None:
        """Return what encrypts a chunk; None where it stays plaintext."""
        cipher = self.column_ciphers[column_ordinal]
        if cipher is None:
            return None
        return ChunkCipher(cipher, self.encryption.algorithm, row_group_ordinal, column_ordinal)

    def protected(self, chunk: ChunkRewrite, column_ordinal: int) -> bytes:
        """Return a chunk of the output's footer: how it is encrypted, and its metadata (spec 5.3).

        Args:
            chunk: The chunk, laid out.
            column_ordinal: Of its column.

        Raises:
            FormatLimitError: The key has encrypted as much as it may.
        """
        key, metadata = self.column_keys[column_ordinal], chunk.new_metadata()
        plaintext_footer = self.encryption.plaintext_footer
        writer = chunk.writer
        changes: dict[int, Entry | None] = {_CRYPTO_METADATA: self._crypto_metadata[column_ordinal]}
        if writer is None or (key is _FOOTER_KEY and not plaintext_footer):
            changes[_META_DATA] = (_STRUCT, metadata)
            changes[_ENCRYPTED_COLUMN_METADATA] = None
            return chunk.new_chunk(changes)
        writer.cipher.reserve(1)
        module = writer.encrypt_reserved(metadata, _COLUMN_META_DATA)
        changes[_META_DATA] = None
        changes[_ENCRYPTED_COLUMN_METADATA] = (_BINARY, module)
        written = chunk.new_chunk(changes)
        if not plaintext_footer:
            return written
        shown, _ = ColumnChunk.read(written)
        self._plaintext_footer.protect_chunk(shown, ColumnMetaData.read(metadata)[0])
        return shown.serialise()

    def footer(self, footer: Footer, row_groups: list[RowGroup]) -> bytes:
        """Return the output's footer with what belongs to it, up to its length (spec 5.4, 5.5).

        Raises:
            VisibleMetadataError: A plaintext footer would lack metadata of the source, and that is to be refused.
        """
        encryption = self.encryption
        if encryption.plaintext_footer:
            metadata = self._plaintext_footer.footer(footer.metadata, row_groups, footer.path)
        else:
            metadata = footer.metadata.shallow_copy()
            metadata.row_groups = row_groups
        metadata.encryption_algorithm = None
        metadata.footer_signing_key_metadata = None
        if not encryption.plaintext_footer:
            crypto = FileCryptoMetaData()
            crypto.encryption_algorithm = encryption.stored_algorithm()
            crypto.key_metadata = encryption.footer_key_metadata
            return crypto.serialise() + self.footer_cipher.encrypt(metadata.serialise(), FOOTER_PLACE)
        metadata.encryption_algorithm = encryption.stored_algorithm()
        metadata.footer_signing_key_metadata = encryption.footer_key_metadata
        return self.footer_cipher.signed(metadata.serialise())


def _crypto_metadata(key: KeyChoice, path: tuple[str, ...]) -> Entry | None:
    if key is ColumnEncryption.PLAINTEXT:
        return None
    crypto = ColumnCryptoMetaData()
    if isinstance(key, ColumnKey):
        with_column_key = EncryptionWithColumnKey()
        with_column_key.path_in_schema = list(path)
        with_column_key.key_metadata = key.key_metadata
        crypto.encryption_with_column_key = with_column_key
    else:
        crypto.encryption_with_footer_key = EncryptionWithFooterKey()
    return WireType.STRUCT, crypto.serialise()


class PlaintextFooterMaker:
    """Makes the parts of a plaintext footer, and keeps account of what is not shown and is nowhere else.

    Args:
        key_values: Which key-value metadata is shown.
        encrypted: Ordinals of the encrypted columns. Where there are none, everything is shown.
    """

    def __init__(self, key_values: VisibleKeyValues, encrypted: Collection[int]) -> None:
        self._key_values = key_values
        self._encrypted = frozenset(encrypted)
        self._lost: dict[str, None] = {}

    def protect_chunk(self, chunk: ColumnChunk, metadata: ColumnMetaData) -> None:
        """Set in the chunk of an encrypted column what is shown of its metadata, and remove fields not known."""
        for field_id in hidden_chunk_fields(chunk.struct):
            chunk.struct.set_entry(field_id, None)
            self._lost[f"field {field_id} of a column chunk"] = None
        for offset_id, length_id in _INDEXES:
            if length_id not in chunk.struct.types():
                chunk.struct.set_entry(offset_id, None)  # Nobody can read an index without its length.
        # All of it is in the encrypted metadata.
        chunk.meta_data, _ = shown_metadata(metadata)

    def footer(self, metadata: FileMetaData, row_groups: list[RowGroup], path: str) -> FileMetaData:
        """Return a footer with these row groups that shows what it may.

        Raises:
            VisibleMetadataError: Something would be lost, and that is to be refused.
        """
        new = metadata.shallow_copy()
        new.row_groups = row_groups
        if not self._encrypted:
            return new
        entries = self._entries(metadata)
        shown_groups = []
        for row_group in row_groups:
            shown_group, hidden = shown_row_group(row_group, self._encrypted)
            self._lost.update(dict.fromkeys(hidden))
            shown_groups.append(shown_group)
        new, hidden = shown_footer(new)
        self._lost.update(dict.fromkeys(hidden))
        new.row_groups = shown_groups
        if new.key_value_metadata is not None:
            new.key_value_metadata = entries or None
        self._report(path)
        return new

    def _entries(self, metadata: FileMetaData) -> list[KeyValue]:
        entries = []
        for entry in metadata.key_value_metadata or ():
            shown = self._key_values.shown(entry)
            if self._key_values.hides(entry):
                part = "" if shown is None else "parts of "
                self._lost[f"{part}the value of key {entry.key[:80]!r}"] = None
            if shown is not None:
                entries.append(shown)
        return entries

    def _report(self, path: str) -> None:
        if not self._lost:
            return
        named = list(self._lost)
        more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        text = f"{', '.join(named[:_MOST_NAMED])}{more}"
        if self._key_values.refuses:
            raise VisibleMetadataError(
                f"{path}: a plaintext footer would show what may hold values of encrypted columns: {text}.",
                hint="List keys that hold none under `plaintext_footer_keys`, drop the rest by "
                "`plaintext_footer_key_values: drop`, or encrypt the footer.",
            )
        _log.warning(
            "%s: left out of the plaintext footer, for it may hold values of encrypted columns: %s", path, text
        )
