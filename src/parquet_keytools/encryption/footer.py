"""Footers of encrypted files: decrypted, or their signature verified (spec 5.3 to 5.5).

Reading takes three steps, so that the caller can ask its KMS for many keys at once:

1. `read_envelope` needs no key. It says which key the footer needs; nothing that it says is authenticated.
2. `FooterEnvelope.open` takes the footer's DEK and authenticates the footer. The `Footer` says how each column is
   encrypted and which keys are needed for that.
3. `Footer.column_metadata` takes the DEKs of columns and decrypts the metadata of their chunks.

`read_footer` does the first two with a `KeyRetriever`.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from parquet_keytools.encryption.aad import ModuleType
from parquet_keytools.encryption.aes import NONCE_LENGTH, TAG_LENGTH
from parquet_keytools.encryption.footer_columns import ColumnEncryption, FooterColumn, columns_of
from parquet_keytools.encryption.footer_modes import Algorithm, FooterMode
from parquet_keytools.encryption.key_retriever import KeyRetriever
from parquet_keytools.encryption.module_cipher import FOOTER_PLACE, ModuleCipher, ModulePlace
from parquet_keytools.errors import (
    AadPrefixError,
    DecryptionError,
    FooterSignatureError,
    KeyNotAvailableError,
    ParquetFormatError,
)
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.format.file_layout import (
    LeafColumn,
    leaf_columns,
    read_footer_bytes,
    refuse_draft_crypto_metadata,
    refuse_draft_footer,
)
from parquet_keytools.format.structs import (
    Aes,
    ColumnChunk,
    ColumnMetaData,
    EncryptionAlgorithm,
    FileCryptoMetaData,
    FileMetaData,
    RowGroup,
)
from parquet_keytools.secret_bytes import SecretBytes

__all__ = [
    "Algorithm",
    "ColumnEncryption",
    "Footer",
    "FooterColumn",
    "FooterEnvelope",
    "FooterMode",
    "read_envelope",
    "read_footer",
]

SIGNATURE_LENGTH = NONCE_LENGTH + TAG_LENGTH
"""Length in bytes of the nonce and the tag that sign a plaintext footer."""


@dataclass(frozen=True)
class FooterEnvelope:
    """What a file says before any key is used; nothing of it is authenticated, so decide by it only which key.

    Attributes:
        path: The file's name, for error texts.
        mode: As the magic and the footer's fields say.
        algorithm: None in a file that is not encrypted. With an encrypted footer no key ever authenticates it
            (spec 5.4): who does not want CTR compares it with what he expects.
        aad_prefix: As stored, or None.
        aad_file_unique: As stored, or None.
        supply_aad_prefix: Whether a prefix was used that is not stored.
        key_metadata: Of the key that encrypts or signs the footer, or None where the file carries none.
        footer_offset: Where the footer begins, in bytes; pages and indexes lie before it.
    """

    path: str
    mode: FooterMode
    algorithm: Algorithm | None
    aad_prefix: bytes | None
    aad_file_unique: bytes | None
    supply_aad_prefix: bool
    key_metadata: bytes | None
    footer_offset: int
    _plaintext: FileMetaData | None = field(repr=False)
    _footer: bytes = field(repr=False)
    """With an encrypted footer its module; with a plaintext footer the serialised footer as read."""
    _signature: bytes = field(repr=False)

    def file_aad(self, aad_prefix: bytes | None = None) -> bytes:
        """Return AAD prefix and file unique, which begin the AAD of every module (spec 4.4).

        Args:
            aad_prefix: The prefix that the caller expects, or None to take what the file stores.

        Raises:
            AadPrefixError: One is needed and not given, or the file has another one, or none.
            ParquetFormatError: The file has no file unique.
        """
        if self.aad_file_unique is None:
            raise ParquetFormatError(
                "the file has no aad_file_unique, which every AAD needs (spec 4.4.2).",
                path=self.path,
                hint="DuckDB 2.0 is known to write such files; no other engine can read them.",
            )
        if self.aad_prefix is not None:
            if aad_prefix is not None and not hmac.compare_digest(aad_prefix, self.aad_prefix):
                raise AadPrefixError(
                    f"{self.path}: the file stores another AAD prefix than the one expected.",
                    hint="It is another file, or another version of it, than the one asked for.",
                )
        elif self.supply_aad_prefix:
            if aad_prefix is None:
                raise AadPrefixError(
                    f"{self.path}: the file was written with an AAD prefix that is not stored in it.",
                    hint="Supply the AAD prefix (spec 4.4.1).",
                )
        elif aad_prefix is not None:
            raise AadPrefixError(
                f"{self.path}: an AAD prefix is expected, and the file was written without one.",
                hint="It is not the file asked for, or it was written by another configuration.",
            )
        return (self.aad_prefix or aad_prefix or b"") + self.aad_file_unique

    def open(self, dek: SecretBytes | None, aad_prefix: bytes | None = None) -> Footer:
        """Authenticate the footer.

        Args:
            dek: The footer's DEK; None for a file that is not encrypted only.
            aad_prefix: The prefix that the caller expects, or None to take what the file stores.

        Raises:
            KeyNotAvailableError: The file is encrypted and no DEK is given.
            DecryptionError: The footer does not authenticate.
            FooterSignatureError: The signature of a plaintext footer is missing or wrong.
            AadPrefixError: See `file_aad`.
            ParquetFormatError: The authentic footer is not what the format says.
        """
        if self.mode is FooterMode.UNENCRYPTED:
            return self._footer_of(self._plaintext, None, b"")
        if dek is None:
            raise KeyNotAvailableError(f"{self.path}: the footer is encrypted or signed, and no key is given.")
        file_aad = self.file_aad(aad_prefix)
        cipher = ModuleCipher(dek, file_aad)
        if self.mode is FooterMode.PLAINTEXT_FOOTER:
            self._verify(cipher)
            return self._footer_of(self._plaintext, cipher, file_aad)
        plaintext = cipher.decrypt(self._footer, FOOTER_PLACE)
        metadata, _ = FileMetaData.read(plaintext)
        return self._footer_of(metadata, cipher, file_aad)

    def is_sealed_by(self, cipher: ModuleCipher) -> bool:
        """Return whether the footer authenticates with the cipher of a footer that was opened before."""
        try:
            if self.mode is FooterMode.PLAINTEXT_FOOTER:
                self._verify(cipher)
            else:
                cipher.decrypt(self._footer, FOOTER_PLACE)
        except DecryptionError:
            return False
        return True

    def unverified_footer(self) -> Footer | None:
        """Return what a plaintext footer shows without a key; None where the footer is encrypted.

        To show to people only: anyone can have written it.
        """
        return None if self._plaintext is None else self._footer_of(self._plaintext, None, b"")

    def _verify(self, cipher: ModuleCipher) -> None:
        if len(self._signature) != SIGNATURE_LENGTH:
            raise FooterSignatureError(
                f"{self.path}: the plaintext footer of an encrypted file is followed by "
                f"{len(self._signature)} bytes where its signature of {SIGNATURE_LENGTH} belongs.",
                module_type=ModuleType.FOOTER.title,
                hint="The signature was removed, or the writer made none (spec 5.5).",
            )
        nonce, tag = self._signature[:NONCE_LENGTH], self._signature[NONCE_LENGTH:]
        aad = cipher.file_aad + bytes([ModuleType.FOOTER])
        if not hmac.compare_digest(cipher.gcm.tag(nonce, self._footer, aad), tag):
            raise FooterSignatureError(
                f"{self.path}: the signature of the plaintext footer is wrong.",
                module_type=ModuleType.FOOTER.title,
                hint="The footer was altered, or was signed with another key or AAD prefix.",
            )

    def _footer_of(self, metadata: FileMetaData | None, cipher: ModuleCipher | None, file_aad: bytes) -> Footer:
        assert metadata is not None
        try:
            row_groups = metadata.row_groups
            chunks = [row_group.columns for row_group in row_groups]
            leaves = leaf_columns(metadata.schema)
            columns = columns_of(leaves, row_groups, chunks, self.mode is not FooterMode.UNENCRYPTED)
        except ParquetFormatError as error:
            raise ParquetFormatError(str(error), path=self.path) from None
        return Footer(self, metadata, row_groups, chunks, leaves, columns, file_aad, cipher)


@dataclass(frozen=True)
class Footer:
    """A footer whose signature was verified, or which was decrypted, or of a file that is not encrypted.

    Attributes:
        envelope: What came before it. By opening the footer its AAD fields are authenticated, and with a plaintext
            footer all of it.
        metadata: The footer itself. Share it read-only.
        row_groups: Those of `metadata`.
        chunks: `chunks[row group ordinal][column ordinal]`.
        leaves: The leaf columns of the schema.
        columns: The same, and how each is encrypted.
        file_aad: AAD prefix and file unique; empty in a file that is not encrypted.
    """

    envelope: FooterEnvelope
    metadata: FileMetaData = field(repr=False)
    row_groups: list[RowGroup] = field(repr=False)
    chunks: list[list[ColumnChunk]] = field(repr=False)
    leaves: tuple[LeafColumn, ...] = field(repr=False)
    columns: tuple[FooterColumn, ...]
    file_aad: bytes
    cipher: ModuleCipher | None = field(repr=False)
    """Under the footer's DEK; None in a file that is not encrypted, and in an unverified footer."""

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
        self, deks: Mapping[tuple[str, ...], SecretBytes], row_group_ordinals: Iterable[int] | None = None
    ) -> dict[tuple[int, int], ColumnMetaData]:
        """Decrypt and parse the metadata of all chunks of the columns whose key is there.

        Args:
            deks: DEKs of columns with a column key, by path. Columns whose DEK is missing are left out.
            row_group_ordinals: The row groups wanted; all where it is None.

        Returns:
            (row group ordinal, column ordinal) -> metadata, also of plaintext columns and those with the
            footer key.

        Raises:
            DecryptionError: The metadata of a chunk does not authenticate.
            ParquetFormatError: It is not what the format says.
        """
        wanted = range(len(self.chunks)) if row_group_ordinals is None else tuple(row_group_ordinals)
        result: dict[tuple[int, int], ColumnMetaData] = {}
        for column in self.columns:
            dek = deks.get(column.path)
            if column.encryption is ColumnEncryption.COLUMN_KEY and dek is None:
                continue
            cipher = self.cipher_of(column, dek)
            for row_group_ordinal in wanted:
                place = (row_group_ordinal, column.ordinal)
                result[place] = self.chunk_metadata(row_group_ordinal, column, cipher)
        return result

    def chunk_metadata(
        self, row_group_ordinal: int, column: FooterColumn, cipher: ModuleCipher | None
    ) -> ColumnMetaData:
        """Return the full metadata of one chunk, decrypted with its column's cipher where it is encrypted.

        Raises:
            DecryptionError: It does not authenticate.
            ParquetFormatError: It is missing, or not what the format says, or that of another column.
        """
        chunk = self.chunks[row_group_ordinal][column.ordinal]
        module = chunk.encrypted_column_metadata
        metadata: ColumnMetaData | None
        if cipher is None or module is None:
            metadata = chunk.meta_data
            if column.encryption is ColumnEncryption.COLUMN_KEY or (
                column.encryption is ColumnEncryption.FOOTER_KEY and self.mode is not FooterMode.ENCRYPTED_FOOTER
            ):
                metadata = None  # What is visible there is stripped, and not the column's own.
        else:
            place = ModulePlace(ModuleType.COLUMN_META_DATA, row_group_ordinal, column.ordinal)
            metadata, _ = ColumnMetaData.read(cipher.decrypt(module, place))
        name = f"row group {row_group_ordinal}, column {'.'.join(column.path)!r}"
        if metadata is None:
            raise ParquetFormatError(f"{name}: the column metadata is missing (spec 5.3).", path=self.path)
        if tuple(metadata.path_in_schema) != column.path:
            raise ParquetFormatError(
                f"{name}: the metadata is that of column {'.'.join(metadata.path_in_schema)!r}.",
                path=self.path,
            )
        return metadata


def read_envelope(source: ByteSource) -> FooterEnvelope:
    """Read the footer of a file as far as it can be read without a key.

    Raises:
        ParquetFormatError: It is not a Parquet file, or its footer is not what the format says.
        DraftFormatError: It follows a draft of the encryption specification.
    """
    footer = read_footer_bytes(source)
    try:
        if footer.is_encrypted:
            crypto, end = FileCryptoMetaData.read(footer.data)
            refuse_draft_crypto_metadata(crypto)
            algorithm, parameters = _algorithm_of(crypto.encryption_algorithm)
            mode, plaintext, key_metadata = FooterMode.ENCRYPTED_FOOTER, None, crypto.key_metadata
            body, signature = footer.data[end:], b""
        else:
            plaintext, end = FileMetaData.read(footer.data)
            refuse_draft_footer(plaintext)
            body, signature = footer.data[:end], footer.data[end:]
            key_metadata = plaintext.footer_signing_key_metadata
            stored = plaintext.encryption_algorithm
            if stored is None:
                mode, algorithm, parameters = FooterMode.UNENCRYPTED, None, Aes()
            else:
                mode = FooterMode.PLAINTEXT_FOOTER
                algorithm, parameters = _algorithm_of(stored)
        return FooterEnvelope(
            path=source.path,
            mode=mode,
            algorithm=algorithm,
            # An empty prefix is none: some writers store the field empty.
            aad_prefix=parameters.aad_prefix or None,
            aad_file_unique=parameters.aad_file_unique,
            supply_aad_prefix=bool(parameters.supply_aad_prefix),
            key_metadata=key_metadata,
            footer_offset=footer.offset,
            _plaintext=plaintext,
            _footer=body,
            _signature=signature,
        )
    except ParquetFormatError as error:
        raise type(error)(str(error), path=source.path) from None


def read_footer(source: ByteSource, retriever: KeyRetriever | None, aad_prefix: bytes | None = None) -> Footer:
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
    envelope.file_aad(aad_prefix)
    return envelope.open(retriever.footer_dek(envelope.key_metadata), aad_prefix)


def _algorithm_of(stored: EncryptionAlgorithm) -> tuple[Algorithm, Aes]:
    gcm, ctr = stored.aes_gcm_v1, stored.aes_gcm_ctr_v1
    if gcm is not None and len(stored.struct.fields) == 1:
        return Algorithm.AES_GCM_V1, gcm
    if ctr is not None and len(stored.struct.fields) == 1:
        return Algorithm.AES_GCM_CTR_V1, ctr
    raise ParquetFormatError("the encryption algorithm is none of AES_GCM_V1 and AES_GCM_CTR_V1 (spec 5.2).")
