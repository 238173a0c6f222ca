"""The keys of a file that is being written: its ciphers, and what its footer says of them (spec 5.2 to 5.5)."""

from __future__ import annotations

import os
from collections.abc import Sequence

from parquet_keytools.encryption.aad import ModuleType
from parquet_keytools.encryption.aes import NONCE_LENGTH
from parquet_keytools.encryption.chunk_rewrite import ChunkRewrite
from parquet_keytools.encryption.file_encryption import ColumnKey, FileEncryption, KeyChoice
from parquet_keytools.encryption.footer import ColumnEncryption, Footer
from parquet_keytools.encryption.module_cipher import FOOTER_PLACE, ModuleCipher
from parquet_keytools.format.structs import (
    ColumnCryptoMetaData,
    ColumnMetaData,
    EncryptionWithColumnKey,
    EncryptionWithFooterKey,
    FileCryptoMetaData,
    RowGroup,
)
from parquet_keytools.secret_bytes import SecretBytes


class OutputKeys:
    """The ciphers of a file that is being encrypted: one for each DEK, so that each counts its invocations.

    Attributes:
        encryption: How the file is encrypted.
        column_keys: The key of each leaf column.
        footer_cipher: Under the footer's DEK.
        column_ciphers: For each leaf column; None where it stays plaintext.
    """

    def __init__(self, encryption: FileEncryption, column_keys: Sequence[KeyChoice]) -> None:
        self.encryption = encryption
        self.column_keys = column_keys
        self._ciphers: list[tuple[SecretBytes, ModuleCipher]] = []
        self.footer_cipher = self._cipher_of(encryption.footer_dek)
        self.column_ciphers = [self._column_cipher(key) for key in column_keys]

    def _column_cipher(self, key: KeyChoice) -> ModuleCipher | None:
        if isinstance(key, ColumnKey):
            return self._cipher_of(key.dek)
        return self.footer_cipher if key is ColumnEncryption.FOOTER_KEY else None

    def _cipher_of(self, dek: SecretBytes) -> ModuleCipher:
        for known, cipher in self._ciphers:
            if known == dek:
                return cipher
        encryption = self.encryption
        cipher = ModuleCipher(dek, encryption.file_aad, invocation_limit=encryption.invocation_limit)
        self._ciphers.append((dek, cipher))
        return cipher

    def protect(self, chunk: ChunkRewrite, path: tuple[str, ...], column_ordinal: int) -> None:
        """Set in a chunk of the output how it is encrypted, and its metadata where that belongs (spec 5.3)."""
        key, new, metadata = self.column_keys[column_ordinal], chunk.new_chunk, chunk.new_metadata
        plaintext_footer = self.encryption.plaintext_footer
        new.encrypted_column_metadata = None
        new.crypto_metadata = _crypto_metadata(key, path)
        if key is ColumnEncryption.PLAINTEXT or (key is ColumnEncryption.FOOTER_KEY and not plaintext_footer):
            new.meta_data = metadata
            return
        writer = chunk.writer
        assert writer is not None
        place = writer.place(ModuleType.COLUMN_META_DATA)
        new.encrypted_column_metadata = writer.cipher.encrypt(metadata.serialise(), place)
        new.meta_data = _stripped(metadata) if plaintext_footer else None

    def footer(self, footer: Footer, row_groups: list[RowGroup]) -> bytes:
        """Return the output's footer with what belongs to it, up to its length (spec 5.4, 5.5)."""
        encryption = self.encryption
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
        serialised = metadata.serialise()
        self.footer_cipher.reserve(1)
        nonce = os.urandom(NONCE_LENGTH)
        aad = FOOTER_PLACE.aad(self.footer_cipher.file_aad)
        return serialised + nonce + self.footer_cipher.gcm.tag(nonce, serialised, aad)


def _crypto_metadata(key: KeyChoice, path: tuple[str, ...]) -> ColumnCryptoMetaData | None:
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
    return crypto


def _stripped(metadata: ColumnMetaData) -> ColumnMetaData:
    """Return what a plaintext footer may show of an encrypted column (spec 5.5)."""
    visible = metadata.shallow_copy()
    for field_id in ColumnMetaData.SENSITIVE_FIELD_IDS:
        visible.struct.fields.pop(field_id, None)
    return visible
