"""Files encrypted, re-keyed and decrypted, as a whole or row group by row group, without decoding a value."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

from parquet_keytools.encryption.aad import FOOTER_PLACE, ModuleType, random_file_unique, refuse_more_than_ordinals
from parquet_keytools.encryption.file_rewriter import (
    INDEX_FIELD_IDS,
    BytesPart,
    ChunkRewrite,
    Part,
    RowGroupRewrite,
    bytes_part,
    laid_out,
    new_row_group,
    rewrite_file,
    write_parts,
)
from parquet_keytools.encryption.footer import Footer, FooterEnvelope
from parquet_keytools.encryption.module_cipher import MAX_INVOCATIONS, ChunkCipher, ModuleCipher
from parquet_keytools.encryption.protection import (
    Algorithm,
    ColumnEncryption,
    FooterMode,
    KeyRetriever,
    naming_file,
)
from parquet_keytools.encryption.stated_algorithm import check_stated_algorithm
from parquet_keytools.errors import (
    AlreadyEncryptedError,
    ColumnAccessDeniedError,
    ConfigurationError,
    KeytoolsError,
    ParquetFormatError,
    VisibleMetadataError,
)
from parquet_keytools.format.file_layout import (
    MAGIC,
    MAGIC_ENCRYPTED_FOOTER,
    Bytes,
    ByteSink,
    ByteSource,
    LeafColumn,
    RegionKind,
    read_footer_bytes,
    unauthenticated_limit,
    with_trailer,
)
from parquet_keytools.format.partial_footers import (
    VisibleKeyValues,
    hidden_chunk_fields,
    shown_footer,
    shown_metadata,
    shown_row_group,
)
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
    RowGroup,
)
from parquet_keytools.format.thrift import Entry, Struct, WireType, read_struct
from parquet_keytools.secret_bytes import SecretBytes

_STRUCT, _BINARY = WireType.STRUCT, WireType.BINARY
_FOOTER_KEY, _COLUMN_META_DATA = ColumnEncryption.FOOTER_KEY, ModuleType.COLUMN_META_DATA
_META_DATA = ColumnChunk.meta_data.field_id
_CRYPTO_METADATA = ColumnChunk.crypto_metadata.field_id
_ENCRYPTED_COLUMN_METADATA = ColumnChunk.encrypted_column_metadata.field_id

_log = logging.getLogger(__name__)

_MOST_NAMED = 20
"""How many hidden things a message names."""


@dataclass(frozen=True)
class ColumnKey:
    """The DEK of a column, and what the file carries for it (spec 4.3)."""

    dek: SecretBytes
    key_metadata: bytes | None = None


KeyChoice = ColumnKey | Literal[ColumnEncryption.FOOTER_KEY, ColumnEncryption.PLAINTEXT]


@dataclass(frozen=True)
class FileEncryption:
    """How one file is encrypted. No other file may use its file unique, and none should use its DEKs."""

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
        """Return the key of each leaf column; raise `ConfigurationError` if a listed column is none of them."""
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
    """The ciphers of a file that is being encrypted, one for each DEK, so that each counts its invocations.

    It makes the parts of the footer, and notes what a plaintext footer does not show and is nowhere else.
    """

    def __init__(self, encryption: FileEncryption, leaves: Sequence[LeafColumn]) -> None:
        self.encryption = encryption
        self.column_keys = encryption.keys_of(leaves)
        self._ciphers: dict[bytes, ModuleCipher] = {}
        self.footer_cipher = self._cipher_of(encryption.footer_dek)
        self.column_ciphers = [self._column_cipher(key) for key in self.column_keys]
        keys = self.column_keys
        self._encrypted = frozenset(i for i, key in enumerate(keys) if key is not ColumnEncryption.PLAINTEXT)
        self._lost: dict[str, None] = {}
        # The same in every row group.
        self._crypto_metadata = [_crypto_metadata(key, leaf.path) for key, leaf in zip(keys, leaves, strict=True)]

    def _column_cipher(self, key: KeyChoice) -> ModuleCipher | None:
        if isinstance(key, ColumnKey):
            return self._cipher_of(key.dek)
        return self.footer_cipher if key is ColumnEncryption.FOOTER_KEY else None

    def _cipher_of(self, dek: SecretBytes) -> ModuleCipher:
        # `reveal` returns the DEK's own bytes, not a copy; they live as long as the ciphers.
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
        """Return a chunk of the output's footer: how it is encrypted, and its metadata (spec 5.3)."""
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
        for field_id in hidden_chunk_fields(shown.struct):
            shown.struct.set_entry(field_id, None)
            self._lost[f"field {field_id} of a column chunk"] = None
        for offset_id, length_id in INDEX_FIELD_IDS.values():
            if not shown.struct.has(length_id):
                shown.struct.set_entry(offset_id, None)  # No reader finds an index without its length.
        # All of it is in the encrypted metadata.
        shown.meta_data, _ = shown_metadata(ColumnMetaData.read(metadata)[0])
        return shown.serialise()

    def footer(self, footer: Footer, row_groups: list[RowGroup]) -> bytes:
        """Return the output's footer with what belongs to it, up to its length (spec 5.4, 5.5)."""
        encryption = self.encryption
        metadata = footer.metadata.shallow_copy()
        metadata.row_groups = row_groups
        if encryption.plaintext_footer and self._encrypted:
            metadata = self._shown(metadata, footer.path)
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

    def _shown(self, metadata: FileMetaData, path: str) -> FileMetaData:
        """Return what a plaintext footer may show; raise `VisibleMetadataError` if the rest must not be lost."""
        entries = []
        for entry in metadata.key_value_metadata or ():
            shown = self.encryption.visible_key_values.shown(entry)
            if shown is None or shown.value != entry.value:
                part = "" if shown is None else "parts of "
                self._lost[f"{part}the value of key {entry.key[:80]!r}"] = None
            if shown is not None:
                entries.append(shown)
        row_groups = []
        for row_group in metadata.row_groups:
            shown_group, hidden = shown_row_group(row_group, self._encrypted)
            self._lost.update(dict.fromkeys(hidden))
            row_groups.append(shown_group)
        new, hidden = shown_footer(metadata)
        self._lost.update(dict.fromkeys(hidden))
        new.row_groups = row_groups
        if new.key_value_metadata is not None:
            new.key_value_metadata = entries or None
        self._report_lost(path)
        return new

    def _report_lost(self, path: str) -> None:
        if not self._lost:
            return
        named = list(self._lost)
        more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        text = f"{', '.join(named[:_MOST_NAMED])}{more}"
        if self.encryption.visible_key_values.refuses:
            raise VisibleMetadataError(
                f"{path}: a plaintext footer would show what may hold values of encrypted columns: {text}.",
                hint="List keys that hold none under `plaintext_footer_keys`, drop the rest by "
                "`plaintext_footer_key_values: drop`, or encrypt the footer.",
            )
        _log.warning(
            "%s: left out of the plaintext footer, for it may hold values of encrypted columns: %s", path, text
        )


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


Deks = Mapping[tuple[str, ...], SecretBytes]
"""DEKs of columns with a column key, by path."""


def decrypt_columns(
    source: ByteSource,
    sink: ByteSink,
    footer: Footer,
    deks: Deks,
    *,
    row_group_ordinals: Sequence[int] | None = None,
    without_indexes: Set[tuple[int, int]] = frozenset(),
    threads: int = 2,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Write a plaintext file of some row groups, None for all; only their bytes are read.

    Of chunks in `without_indexes` (ordinals of row group and column), indexes and Bloom filter are left out.
    """
    check_stated_algorithm(source, footer, deks)
    row_groups = open_chunks(footer, deks, lambda *_: None, row_group_ordinals, without_indexes)
    metadata = footer.metadata.shallow_copy()
    if row_group_ordinals is not None:
        metadata.num_rows = sum(row_group.num_rows for row_group, _ in row_groups)
    rewrite_file(
        source,
        sink,
        footer,
        row_groups,
        magic=MAGIC,
        make_footer=lambda: _plaintext_footer(metadata, row_groups),
        threads=threads,
        on_progress=on_progress,
    )


def authenticate_columns(source: ByteSource, footer: Footer, deks: Deks) -> None:
    """Decrypt what `decrypt_columns` would, and write nothing."""
    decrypt_columns(source, _Nowhere(), footer, deks)


class _Nowhere:
    """Takes what is decrypted for the sake of its authentication."""

    takes_any_order = True

    def reserve(self, length: int) -> None:
        pass

    def write_at(self, offset: int, data: Bytes) -> None:
        pass


def _plaintext_footer(metadata: FileMetaData, row_groups: list[RowGroupRewrite]) -> bytes:
    new_row_groups = []
    for ordinal, (row_group, chunks) in enumerate(row_groups):
        columns: list[bytes | Struct] = []
        for chunk in chunks:
            shown = (_STRUCT, chunk.new_metadata())
            columns.append(
                chunk.new_chunk({_META_DATA: shown, _CRYPTO_METADATA: None, _ENCRYPTED_COLUMN_METADATA: None})
            )
        new_row_groups.append(new_row_group(ordinal, row_group, chunks, columns))
    metadata.row_groups = new_row_groups
    metadata.encryption_algorithm = None
    metadata.footer_signing_key_metadata = None
    return metadata.serialise()


def column_deks(footer: Footer, retriever: KeyRetriever) -> dict[tuple[str, ...], SecretBytes]:
    """Return the DEKs of all columns with column keys, asked for together, or raise `ColumnAccessDeniedError`."""
    columns = [column for column in footer.columns if column.encryption is ColumnEncryption.COLUMN_KEY]
    if not columns:
        return {}
    outcomes = retriever.column_deks([(column.path, column.key_metadata) for column in columns])
    deks: dict[tuple[str, ...], SecretBytes] = {}
    denied: list[tuple[str, KeytoolsError]] = []
    for column, outcome in zip(columns, outcomes, strict=True):
        if isinstance(outcome, KeytoolsError):
            denied.append((".".join(column.path), outcome))
        else:
            deks[column.path] = outcome
    if denied:
        raise ColumnAccessDeniedError([name for name, _ in denied], [cause for _, cause in denied])
    return deks


def open_chunks(
    footer: Footer,
    deks: Deks,
    writer_of: Callable[[int, int], ChunkCipher | None],
    row_group_ordinals: Sequence[int] | None = None,
    without_indexes: Set[tuple[int, int]] = frozenset(),
) -> list[RowGroupRewrite]:
    """Decrypt the metadata of chunks, and make them ready to be rewritten; see `decrypt_columns`."""
    columns = footer.columns
    ciphers = [footer.cipher_of(column, deks.get(column.path)) for column in columns]
    row_groups: list[RowGroupRewrite] = []
    ordinals = range(len(footer.row_groups)) if row_group_ordinals is None else row_group_ordinals
    for row_group_ordinal in ordinals:
        chunks: list[ChunkRewrite] = []
        row_group = footer.row_groups[row_group_ordinal]
        num_rows = row_group.num_rows
        for column, cipher in zip(columns, ciphers, strict=True):
            reader = None
            if cipher is not None:
                reader = ChunkCipher(cipher, footer.algorithm, row_group_ordinal, column.ordinal)
            chunk = ChunkRewrite(
                footer.chunks[row_group_ordinal][column.ordinal].struct,
                footer.chunk_metadata(row_group_ordinal, column, cipher).struct,
                reader,
                writer_of(row_group_ordinal, column.ordinal),
                num_rows=num_rows,
                is_flat=footer.leaves[column.ordinal].is_flat,
            )
            if (row_group_ordinal, column.ordinal) in without_indexes:
                chunk.forget_indexes()
            chunks.append(chunk)
        row_groups.append((row_group, chunks))
    return row_groups


def encrypt_source(
    source: ByteSource,
    sink: ByteSink,
    encryption: FileEncryption,
    *,
    threads: int = 2,
) -> None:
    """Encrypt a plaintext file."""
    footer = read_plaintext_footer(source)
    encrypt_opened(source, sink, footer, {}, encryption, threads=threads)


def read_plaintext_footer(source: ByteSource) -> Footer:
    """Read the whole footer of a file that is not encrypted; there is nothing to authenticate first."""
    footer = read_footer_bytes(source)
    read = None
    with naming_file(source.path):
        if not footer.is_encrypted:
            data = footer.data
            read = FileMetaData.read_whole(data, max_memory=unauthenticated_limit(len(data)))
        envelope = FooterEnvelope.of(footer, source.path, read)
    if read is None or envelope.mode is not FooterMode.UNENCRYPTED:
        raise AlreadyEncryptedError(
            f"{source.path} is encrypted already.", hint="Use rekey to encrypt it with other keys."
        )
    return envelope.with_metadata(read[0])


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
    """Encrypt a file whose footer is open: a plaintext file, or an encrypted one with other keys."""
    refuse_more_than_ordinals(source.path, row_groups=len(footer.row_groups), columns=len(footer.leaves))
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
        footer,
        row_groups,
        magic=MAGIC if encryption.plaintext_footer else MAGIC_ENCRYPTED_FOOTER,
        make_footer=make_footer,
        threads=threads,
        on_progress=on_progress,
    )


Index = tuple[Struct, int, bytes]
"""The chunk that an index is of, the id of the field that has the index's offset, and the bytes of its module."""


class StreamedFile:
    """An encrypted file written row group by row group: at most one is held in memory.

    It takes plaintext Parquet files of one schema and encrypts their row groups into one file.

    Page indexes are held until the end and written together before the footer, so that a reader gets the indexes
    of many row groups with one read.
    """

    def __init__(self, sink: ByteSink, encryption: FileEncryption, template: ByteSource):
        """Begin the file; `template` is a plaintext file with the schema."""
        self.num_rows = 0
        self.size_bytes = 0
        self._sink = sink
        footer = read_plaintext_footer(template)
        refuse_more_than_ordinals(template.path, columns=len(footer.leaves))
        self._schema = footer.metadata.bytes_of(FileMetaData.schema)
        self._keys = OutputKeys(encryption, footer.leaves)
        self._magic = MAGIC if encryption.plaintext_footer else MAGIC_ENCRYPTED_FOOTER
        self._row_groups: list[RowGroup] = []
        self._indexes: dict[RegionKind, list[Index]] = {RegionKind.COLUMN_INDEX: [], RegionKind.OFFSET_INDEX: []}
        self._write([bytes_part(self._magic)])

    def append(self, source: ByteSource) -> None:
        """Encrypt and write the row groups of a plaintext file with the same schema; nothing of it is held."""
        footer = read_plaintext_footer(source)
        if footer.metadata.bytes_of(FileMetaData.schema) != self._schema:
            raise ParquetFormatError("a row group has another schema than the file.", path=source.path)
        first = len(self._row_groups)
        refuse_more_than_ordinals(source.path, row_groups=first + len(footer.row_groups))
        row_groups = open_chunks(
            footer, {}, lambda row_group, column: self._keys.writer_of(first + row_group, column)
        )
        parts: list[Part] = []
        indexes: dict[ChunkRewrite, list[tuple[RegionKind, bytes]]] = {}
        for region, chunk, part in laid_out(source, footer, row_groups, self.size_bytes, self._indexes):
            if region.kind not in self._indexes:
                parts.append(part)
            elif isinstance(part, BytesPart) and part.length:
                indexes.setdefault(chunk, []).append((region.kind, bytes(part.make())))
        self._write(parts)
        for ordinal, (row_group, chunks) in enumerate(row_groups, first):
            columns: list[bytes | Struct] = []
            for column_ordinal, chunk in enumerate(chunks):
                written = self._keys.protected(chunk, column_ordinal)
                its_indexes = indexes.get(chunk, ())
                struct_of_it = read_struct(written)[0] if its_indexes else None
                columns.append(struct_of_it or written)
                for kind, module in its_indexes:
                    assert struct_of_it is not None
                    self._indexes[kind].append((struct_of_it, INDEX_FIELD_IDS[kind][0], module))
            self._row_groups.append(new_row_group(ordinal, row_group, chunks, columns))
        self.num_rows += footer.metadata.num_rows

    def finish(self, template: ByteSource) -> None:
        """Write what follows the row groups; `template` is a file without rows, with the key-value metadata."""
        footer = read_plaintext_footer(template)
        if footer.metadata.bytes_of(FileMetaData.schema) != self._schema:
            raise ParquetFormatError("the footer has another schema than the file.", path=template.path)
        offset = self.size_bytes
        parts: list[Part] = []
        for chunk, offset_field_id, module in (index for kind in self._indexes.values() for index in kind):
            chunk.set_entry(offset_field_id, (WireType.I64, offset))
            parts.append(bytes_part(module))
            offset += len(module)
        footer.metadata.num_rows = self.num_rows
        data = self._keys.footer(footer, self._row_groups)
        parts.append(bytes_part(with_trailer(data, self._magic)))
        self._write(parts)

    def _write(self, parts: list[Part]) -> None:
        write_parts(parts, self._sink, offset=self.size_bytes)
        self.size_bytes += sum(part.length for part in parts)
