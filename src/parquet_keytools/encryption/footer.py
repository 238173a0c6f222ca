"""Footers of encrypted files: decrypted, or their signature verified (spec 5.3 to 5.5).

Reading takes three steps, so that the caller can ask its KMS for many keys at once: `read_envelope` needs no key,
and says which key the footer needs; `FooterEnvelope.open` authenticates the footer, which says the keys of
columns; `Footer.chunk_metadata` decrypts the metadata of chunks. `read_footer` does the first two.
"""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from parquet_keytools.encryption.aad import FOOTER_PLACE, AadPrefix, ModulePlace, ModuleType, aad_prefixes
from parquet_keytools.encryption.module_cipher import NONCE_LENGTH, TAG_LENGTH, ModuleCipher
from parquet_keytools.encryption.protection import (
    Algorithm,
    ColumnEncryption,
    Envelope,
    FooterColumn,
    FooterMode,
    KeyRetriever,
    check_chunk,
    columns_of,
    leaves_of,
    naming_file,
)
from parquet_keytools.errors import (
    DecryptionError,
    FooterSignatureError,
    KeyNotAvailableError,
    ParquetFormatError,
)
from parquet_keytools.format.file_layout import (
    ByteSource,
    LeafColumn,
    read_footer_bytes,
    unauthenticated_limit,
)
from parquet_keytools.format.structs import (
    ColumnChunk,
    ColumnMetaData,
    FileMetaData,
    RowGroup,
)
from parquet_keytools.secret_bytes import SecretBytes

SIGNATURE_LENGTH = NONCE_LENGTH + TAG_LENGTH
"""Length in bytes of the nonce and the tag that sign a plaintext footer."""


@dataclass(frozen=True)
class FooterEnvelope(Envelope):
    """An envelope whose footer can be opened."""

    def file_aads(self, aad_prefix: AadPrefix = None) -> tuple[bytes, ...]:
        """Return AAD prefix and file unique, which begin every AAD (spec 4.4); see `aad_prefixes`."""
        prefixes = aad_prefixes(
            aad_prefix,
            self.aad_prefix,
            self.aad_file_unique,
            self.path,
            supply_aad_prefix=self.supply_aad_prefix,
        )
        return tuple(prefix + (self.aad_file_unique or b"") for prefix in prefixes)

    def open(self, dek: SecretBytes | None, aad_prefix: AadPrefix = None, *, checks_chunks: bool = True) -> Footer:
        """Authenticate the footer, with its DEK where the file is encrypted; only then what it says is built.

        Without `checks_chunks`, `Footer.chunk_metadata` checks that each column is encrypted alike in all row
        groups. Raises `KeyNotAvailableError`, `DecryptionError`, `FooterSignatureError`, `AadPrefixError`, or
        `ParquetFormatError`.
        """
        footer = self._opened(dek, aad_prefix)
        if checks_chunks:
            for row_group_ordinal in range(1, len(footer.chunks)):
                for column in footer.columns:
                    footer.check_chunk(row_group_ordinal, column)
        return footer

    def _opened(self, dek: SecretBytes | None, aad_prefix: AadPrefix) -> Footer:
        if self.mode is FooterMode.UNENCRYPTED:
            return self._footer_of(self.body, None, unauthenticated_limit(len(self.body)))
        if dek is None:
            raise KeyNotAvailableError(f"{self.path}: the footer is encrypted or signed, and no key is given.")
        cipher, *others = [ModuleCipher(dek, file_aad) for file_aad in self.file_aads(aad_prefix)]
        try:
            return self._footer_of(self._authentic(cipher), cipher)
        except DecryptionError:
            for other in others:
                # A wrong AAD and a wrong key look alike; the first error is as good as any.
                with contextlib.suppress(DecryptionError):
                    return self._footer_of(self._authentic(other), other)
            raise

    def _authentic(self, cipher: ModuleCipher) -> bytes | memoryview:
        if self.mode is FooterMode.PLAINTEXT_FOOTER:
            self._verify(cipher)
            return self.body
        return cipher.decrypt(self.body, FOOTER_PLACE)

    def is_sealed_by(self, cipher: ModuleCipher) -> bool:
        """Return whether the footer authenticates with the cipher of a footer that was opened before."""
        try:
            self._authentic(cipher)
        except DecryptionError:
            return False
        return True

    def unverified_footer(self) -> Footer | None:
        """Return a plaintext footer without a key, to show to people only; None where it is encrypted."""
        if self.mode is FooterMode.ENCRYPTED_FOOTER:
            return None
        return self._footer_of(self.body, None, unauthenticated_limit(len(self.body)))

    def _verify(self, cipher: ModuleCipher) -> None:
        if len(self.signature) != SIGNATURE_LENGTH:
            raise FooterSignatureError(
                f"{self.path}: the plaintext footer of an encrypted file is followed by "
                f"{len(self.signature)} bytes where its signature of {SIGNATURE_LENGTH} belongs.",
                module_type=ModuleType.FOOTER.title,
                hint="The signature was removed, or the writer made none (spec 5.5).",
            )
        nonce, tag = self.signature[:NONCE_LENGTH], self.signature[NONCE_LENGTH:]
        aad = cipher.file_aad + bytes([ModuleType.FOOTER])
        if not hmac.compare_digest(cipher.gcm.tag(nonce, self.body, aad), tag):
            raise FooterSignatureError(
                f"{self.path}: the signature of the plaintext footer is wrong.",
                module_type=ModuleType.FOOTER.title,
                hint="The footer was altered, or was signed with another key or AAD prefix.",
            )

    def _footer_of(
        self, data: bytes | memoryview, cipher: ModuleCipher | None, max_memory: int | None = None
    ) -> Footer:
        with naming_file(self.path):
            metadata, _ = FileMetaData.read(data, max_memory=max_memory)
        return self.with_metadata(metadata, cipher)

    def with_metadata(self, metadata: FileMetaData, cipher: ModuleCipher | None = None) -> Footer:
        """Return the footer that was read, and is authentic if the file is encrypted."""
        with naming_file(self.path):
            row_groups = metadata.row_groups
            chunks = [row_group.columns for row_group in row_groups]
            leaves = leaves_of(metadata)
            columns = columns_of(leaves, row_groups, chunks, self.mode is not FooterMode.UNENCRYPTED)
        return Footer(self, metadata, row_groups, chunks, leaves, columns, cipher)


@dataclass(frozen=True)
class Footer:
    """A footer whose signature was verified, or which was decrypted, or of a file that is not encrypted.

    By opening it, the AAD fields of its envelope were authenticated, and with a plaintext footer all of it.
    Metadata is shared read-only; chunks are `chunks[row group ordinal][column ordinal]`. The columns are the
    leaves, and how each is encrypted in the first row group.
    """

    envelope: FooterEnvelope
    metadata: FileMetaData = field(repr=False)
    row_groups: list[RowGroup] = field(repr=False)
    chunks: Sequence[Sequence[ColumnChunk]] = field(repr=False)
    leaves: tuple[LeafColumn, ...] = field(repr=False)
    columns: tuple[FooterColumn, ...]
    cipher: ModuleCipher | None = field(repr=False)
    """Under the footer's DEK; None in a file that is not encrypted, and in an unverified footer."""
    crypto_metadata: dict[int, object] = field(default_factory=dict, repr=False)
    """By column ordinal, of the first row group; as far as chunks were compared with it."""
    checked_metadata: dict[tuple[int, int], ColumnMetaData] = field(default_factory=dict, repr=False)
    """What `check_column` read, by the ordinals of row group and column, until it is used."""

    @property
    def protected_columns(self) -> frozenset[tuple[str, ...]]:
        """Leaf paths of the columns that are encrypted."""
        return frozenset(
            column.path for column in self.columns if column.encryption is not ColumnEncryption.PLAINTEXT
        )

    @property
    def file_aad(self) -> bytes:
        """AAD prefix and file unique; empty in a file that is not encrypted."""
        return b"" if self.cipher is None else self.cipher.file_aad

    @property
    def path(self) -> str:
        """The file's name, for error texts."""
        return self.envelope.path

    @property
    def mode(self) -> FooterMode:
        """How the footer is protected."""
        return self.envelope.mode

    @property
    def algorithm(self) -> Algorithm | None:
        """The encryption algorithm; None in a file that is not encrypted."""
        return self.envelope.algorithm

    @property
    def aad_prefix(self) -> bytes:
        """The AAD prefix that the footer authenticated with, stored or not; empty where there is none."""
        return self.file_aad[: len(self.file_aad) - len(self.envelope.aad_file_unique or b"")]

    @property
    def key_metadata(self) -> bytes | None:
        """Key metadata of the footer's key."""
        return self.envelope.key_metadata

    def cipher_of(self, column: FooterColumn, dek: SecretBytes | None) -> ModuleCipher | None:
        """Return the cipher of a column's modules; None for a plaintext column. Only column keys need the DEK."""
        if column.encryption is ColumnEncryption.PLAINTEXT:
            return None
        if column.encryption is ColumnEncryption.FOOTER_KEY and self.cipher is not None:
            return self.cipher
        if dek is None:
            raise KeyNotAvailableError(f"{self.path}: no key is given for column {'.'.join(column.path)!r}.")
        return ModuleCipher(dek, self.file_aad)

    def column_metadata(
        self, deks: Mapping[tuple[str, ...], SecretBytes]
    ) -> dict[tuple[int, int], ColumnMetaData]:
        """Return (row group ordinal, column ordinal) -> decrypted metadata of the columns whose key is there."""
        result: dict[tuple[int, int], ColumnMetaData] = {}
        for column in self.columns:
            dek = deks.get(column.path)
            if column.encryption is ColumnEncryption.COLUMN_KEY and dek is None:
                continue
            cipher = self.cipher_of(column, dek)
            for row_group_ordinal in range(len(self.chunks)):
                place = (row_group_ordinal, column.ordinal)
                result[place] = self.chunk_metadata(row_group_ordinal, column, cipher)
        return result

    def check_column(self, column: FooterColumn, dek: SecretBytes | None) -> None:
        """Check that the metadata of all chunks of a column is authentic and its own; see `chunk_metadata`."""
        cipher = self.cipher_of(column, dek)
        for row_group_ordinal in range(len(self.row_groups)):
            metadata = self.chunk_metadata(row_group_ordinal, column, cipher)
            self.checked_metadata[row_group_ordinal, column.ordinal] = metadata

    def check_chunk(self, row_group_ordinal: int, column: FooterColumn) -> ColumnChunk:
        """Return a chunk; raise `ParquetFormatError` if it is encrypted unlike the first one of its column."""
        ordinal = column.ordinal
        chunk = self.chunks[row_group_ordinal][ordinal]
        if row_group_ordinal:
            first = self.crypto_metadata.get(ordinal)
            if first is None:
                first = self.crypto_metadata[ordinal] = _crypto_metadata(self.chunks[0][ordinal])
            # Byte for byte the same in every row group, as a rule.
            if first != _crypto_metadata(chunk):
                with naming_file(self.path):
                    check_chunk(row_group_ordinal, self.leaves[ordinal], chunk, column)
        return chunk

    def chunk_metadata(
        self, row_group_ordinal: int, column: FooterColumn, cipher: ModuleCipher | None
    ) -> ColumnMetaData:
        """Return the full metadata of one chunk; it is authentic, and belongs to its column."""
        checked = self.checked_metadata.pop((row_group_ordinal, column.ordinal), None)
        if checked is not None:
            return checked
        chunk = self.check_chunk(row_group_ordinal, column)
        module = None if cipher is None else chunk.encrypted_column_metadata
        metadata: ColumnMetaData | None
        if cipher is None or module is None:
            metadata = chunk.meta_data
            if column.encryption is not _PLAINTEXT and (
                column.encryption is ColumnEncryption.COLUMN_KEY or self.mode is not FooterMode.ENCRYPTED_FOOTER
            ):
                metadata = None  # What is visible there is stripped, and not the column's own.
        else:
            place = ModulePlace(_COLUMN_META_DATA, row_group_ordinal, column.ordinal)
            metadata, _ = ColumnMetaData.read(cipher.decrypt(module, place))
        if metadata is None:
            wrong = "the column metadata is missing (spec 5.3)."
        elif metadata.has_path(column.path):
            return metadata
        else:
            wrong = f"the metadata belongs to column {'.'.join(metadata.path_in_schema)!r}."
        name = f"row group {row_group_ordinal}, column {'.'.join(column.path)!r}"
        raise ParquetFormatError(f"{name}: {wrong}", path=self.path)


def _crypto_metadata(chunk: ColumnChunk) -> object:
    """Return the bytes that say how a chunk is encrypted; if there are none, whether only they are missing."""
    found = chunk.struct.entry_bytes(ColumnChunk.crypto_metadata.field_id)
    return found or chunk.struct.has(ColumnChunk.encrypted_column_metadata.field_id)


_PLAINTEXT, _COLUMN_META_DATA = ColumnEncryption.PLAINTEXT, ModuleType.COLUMN_META_DATA


def read_envelope(source: ByteSource, *, reads_head: bool = True) -> FooterEnvelope:
    """Read the footer of a file as far as it can be read without a key; arguments as of `read_footer_bytes`."""
    footer = read_footer_bytes(source, reads_head=reads_head)
    with naming_file(source.path):
        return FooterEnvelope.of(footer, source.path)


def read_footer(source: ByteSource, retriever: KeyRetriever | None, aad_prefix: AadPrefix = None) -> Footer:
    """Read and authenticate the footer of a file; no retriever for files that are not encrypted."""
    envelope = read_envelope(source)
    if envelope.mode is FooterMode.UNENCRYPTED or retriever is None:
        return envelope.open(None, aad_prefix)
    # What is wrong with the AAD is found before a KMS is asked.
    envelope.file_aads(aad_prefix)
    return envelope.open(retriever.footer_dek(envelope.key_metadata), aad_prefix)
