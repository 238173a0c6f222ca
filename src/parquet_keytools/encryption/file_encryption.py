"""How a file is to be encrypted: which keys, which mode, which algorithm."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from parquet_keytools.encryption.aad import FILE_UNIQUE_LENGTH_BYTES
from parquet_keytools.encryption.footer import Algorithm, ColumnEncryption
from parquet_keytools.encryption.module_cipher import MAX_INVOCATIONS
from parquet_keytools.errors import ConfigurationError
from parquet_keytools.format.file_layout import LeafColumn
from parquet_keytools.format.structs import Aes, EncryptionAlgorithm
from parquet_keytools.secret_bytes import SecretBytes


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
    aad_file_unique: bytes = field(default_factory=lambda: os.urandom(FILE_UNIQUE_LENGTH_BYTES))
    invocation_limit: int = MAX_INVOCATIONS

    @property
    def file_aad(self) -> bytes:
        """AAD prefix and file unique, which begin the AAD of every module."""
        return (self.aad_prefix or b"") + self.aad_file_unique

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
