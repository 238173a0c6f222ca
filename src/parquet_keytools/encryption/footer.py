"""Footers of encrypted files: decrypted, or their signature verified (spec 5.3 to 5.5).

Reading takes three steps, so that the caller can ask its KMS for many keys at once:

1. `read_envelope` needs no key. It says which key the footer needs; nothing that it says is authenticated.
2. `FooterEnvelope.open` takes the footer's DEK and authenticates the footer. The `Footer` says how each column is
   encrypted and which keys are needed for that.
3. `Footer.column_metadata` takes the DEKs of columns and decrypts the metadata of their chunks.

`read_footer` does the first two with a `KeyRetriever`.
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
        """Return AAD prefix and file unique, which begin the AAD of every module (spec 4.4).

        Args:
            aad_prefix: The prefix that the caller expects, or None to take what the file stores.

        Returns:
            What they may be, the likeliest first; more than one only where the prefix is not stored.

        Raises:
            AadPrefixError: One is needed and not given, or the file has another one, or none; or one is expected
                and the file unique may hold a part of it.
            ParquetFormatError: The file has no file unique.
        """
        prefixes = aad_prefixes(
            aad_prefix,
            self.aad_prefix,
            self.aad_file_unique,
            self.path,
            supply_aad_prefix=self.supply_aad_prefix,
        )
        return tuple(prefix + (self.aad_file_unique or b"") for prefix in prefixes)

    def open(self, dek: SecretBytes | None, aad_prefix: AadPrefix = None, *, checks_chunks: bool = True) -> Footer:
        """Authenticate the footer.

        Args:
            dek: The footer's DEK; None for a file that is not encrypted only.
            aad_prefix: The prefix that the caller expects, or None to take what the file stores.
            checks_chunks: Whether to check that each column is encrypted alike in all row groups. Otherwise
                `Footer.chunk_metadata` checks each chunk.

        Only then what it says is built, which takes many times its length in memory.

        Raises:
            KeyNotAvailableError: The file is encrypted and no DEK is given.
            DecryptionError: The footer does not authenticate.
            FooterSignatureError: The signature of a plaintext footer is missing or wrong.
            AadPrefixError: See `file_aads`.
            ParquetFormatError: The authentic footer is not what the format says.
        """
        footer = self._opened(dek, aad_prefix)
        if checks_chunks:
            for row_group_ordinal in range(1, len(footer.chunks)):
                for column in footer.columns:
                    footer.check_chunk(row_group_ordinal, column)
        return footer

    def _opened(self, dek: SecretBytes | None, aad_prefix: AadPrefix) -> Footer:
        if self.mode is FooterMode.UNENCRYPTED:
            return self._footer_of(self.body, None, b"", unauthenticated_limit(len(self.body)))
        if dek is None:
            raise KeyNotAvailableError(f"{self.path}: the footer is encrypted or signed, and no key is given.")
        file_aad, *others = self.file_aads(aad_prefix)
        try:
            return self._open(dek, file_aad)
        except DecryptionError:
            for other in others:
                # A wrong AAD and a wrong key look alike; the first error is as good as any.
                with contextlib.suppress(DecryptionError):
                    return self._open(dek, other)
            raise

    def _open(self, dek: SecretBytes, file_aad: bytes) -> Footer:
        cipher = ModuleCipher(dek, file_aad)
        if self.mode is FooterMode.PLAINTEXT_FOOTER:
            self._verify(cipher)
            return self._footer_of(self.body, cipher, file_aad)
        return self._footer_of(cipher.decrypt(self.body, FOOTER_PLACE), cipher, file_aad)

    def is_sealed_by(self, cipher: ModuleCipher) -> bool:
        """Return whether the footer authenticates with the cipher of a footer that was opened before."""
        try:
            if self.mode is FooterMode.PLAINTEXT_FOOTER:
                self._verify(cipher)
            else:
                cipher.decrypt(self.body, FOOTER_PLACE)
        except DecryptionError:
            return False
        return True

    def unverified_footer(self) -> Footer | None:
        """Return what a plaintext footer shows without a key; None where the footer is encrypted.

        To show to people only: anyone can have written it.

        Raises:
            ParquetFormatError: It is not what the format says, or takes far more memory than an honest one.
        """
        if self.mode is FooterMode.ENCRYPTED_FOOTER:
            return None
        return self._footer_of(self.body, None, b"", unauthenticated_limit(len(self.body)))

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
        self, data: bytes | memoryview, cipher: ModuleCipher | None, file_aad: bytes, max_memory: int | None = None
    ) -> Footer:
        with naming_file(self.path):
            metadata, _ = FileMetaData.read(data, max_memory=max_memory)
        return self.with_metadata(metadata, cipher, file_aad)

    def with_metadata(self, metadata: FileMetaData, cipher: ModuleCipher | None, file_aad: bytes) -> Footer:
        """Return the footer that was read, and is authentic if the file is encrypted.

        Raises:
            ParquetFormatError: It is not what the format says.
        """
        with naming_file(self.path):
            row_groups = metadata.row_groups
            chunks = [row_group.columns for row_group in row_groups]
            leaves = leaves_of(metadata)
            columns = columns_of(leaves, row_groups, chunks, self.mode is not FooterMode.UNENCRYPTED)
        return Footer(self, metadata, row_groups, chunks, leaves, columns, file_aad, cipher)


@dataclass(frozen=True)
class Footer:
    """A footer whose signature was verified, or which was decrypted, or of a file that is not encrypted.

    Attributes:
        envelope: What came before it. By opening the footer its AAD fields are authenticated, and with a plaintext
            footer all of it.
        metadata: The footer itself. Share it read-only.
        row_groups: Those of `metadata`.
        chunks: The column chunks: `chunks[row group ordinal][column ordinal]`.
        leaves: The leaf columns of the schema.
        columns: The same, and how each is encrypted in the first row group.
        file_aad: AAD prefix and file unique; empty in a file that is not encrypted.
    """

    envelope: FooterEnvelope
    metadata: FileMetaData = field(repr=False)
    row_groups: list[RowGroup] = field(repr=False)
    chunks: Sequence[Sequence[ColumnChunk]] = field(repr=False)
    leaves: tuple[LeafColumn, ...] = field(repr=False)
    columns: tuple[FooterColumn, ...]
    file_aad: bytes
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
        """Return the cipher of a column's modules; None for a plaintext column.

        Args:
            column: One of `columns`.
            dek: Its own DEK; only looked at where it has a column key.

        Raises:
            KeyNotAvailableError: No DEK is given where one is needed.
        """
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
        """Decrypt and parse the metadata of all chunks of the columns whose key is there.

        Args:
            deks: DEKs of columns with a column key, by path. Columns whose DEK is missing are left out.

        Returns:
            (row group ordinal, column ordinal) -> metadata, also of plaintext columns and those with the
            footer key.

        Raises:
            DecryptionError: The metadata of a chunk does not authenticate.
            ParquetFormatError: It is not what the format says.
        """
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
        """Check that the metadata of all chunks of a column is authentic and its own; see `chunk_metadata`.

        Args:
            column: One of `columns`.
            dek: Its own DEK; only looked at where it has a column key.
        """
        cipher = self.cipher_of(column, dek)
        for row_group_ordinal in range(len(self.row_groups)):
            metadata = self.chunk_metadata(row_group_ordinal, column, cipher)
            self.checked_metadata[row_group_ordinal, column.ordinal] = metadata

    def check_chunk(self, row_group_ordinal: int, column: FooterColumn) -> ColumnChunk:
        """Return a chunk of a column that is encrypted as in the first row group.

        Raises:
            ParquetFormatError: It is not.
        """
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
        """Return the full metadata of one chunk, decrypted with its column's cipher where it is encrypted.

        Raises:
            DecryptionError: It does not authenticate.
            ParquetFormatError: It is missing, or not what the format says, or belongs to another column.
        """
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
            wrong = f"the metadata is that of column {'.'.join(metadata.path_in_schema)!r}."
        name = f"row group {row_group_ordinal}, column {'.'.join(column.path)!r}"
        raise ParquetFormatError(f"{name}: {wrong}", path=self.path)


def _crypto_metadata(chunk: ColumnChunk) -> object:
    """Return the bytes that say how a chunk is encrypted; if there are none, whether only they are missing."""
    found = chunk.struct.entry_bytes(ColumnChunk.crypto_metadata.field_id)
    return found or chunk.struct.has(ColumnChunk.encrypted_column_metadata.field_id)


_PLAINTEXT, _COLUMN_META_DATA = ColumnEncryption.PLAINTEXT, ModuleType.COLUMN_META_DATA


def read_envelope(source: ByteSource, *, reads_head: bool = True) -> FooterEnvelope:
    """Read the footer of a file as far as it can be read without a key; arguments as of `read_footer_bytes`.

    Raises:
        ParquetFormatError: It is not a Parquet file, or its footer is not what the format says.
        DraftFormatError: It follows a draft of the encryption specification.
    """
    footer = read_footer_bytes(source, reads_head=reads_head)
    with naming_file(source.path):
        return FooterEnvelope.of(footer, source.path)


def read_footer(source: ByteSource, retriever: KeyRetriever | None, aad_prefix: AadPrefix = None) -> Footer:
    """Read and authenticate the footer of a file.

    Args:
        source: The file.
        retriever: Where the footer's DEK comes from; None for files that are not encrypted only.
        aad_prefix: The prefix that the caller expects, or None to take what the file stores.

    Raises:
        KeytoolsError: As `read_envelope`, `FooterEnvelope.open`, and what the retriever raises.
    """
    envelope = read_envelope(source)
    if envelope.mode is FooterMode.UNENCRYPTED or retriever is None:
        return envelope.open(None, aad_prefix)
    # What is wrong with the AAD is found before a KMS is asked.
    envelope.file_aads(aad_prefix)
    return envelope.open(retriever.footer_dek(envelope.key_metadata), aad_prefix)
