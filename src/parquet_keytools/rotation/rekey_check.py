"""A file with new data keys, checked before it takes the place of the old one."""

from __future__ import annotations

from collections.abc import Iterator

from parquet_keytools.encryption import file_decryptor
from parquet_keytools.encryption.file_encryption import ColumnKey
from parquet_keytools.encryption.footer import Footer, read_envelope
from parquet_keytools.errors import KeyMaterialError, OutputError, value_or_raise
from parquet_keytools.format.byte_ranges import Bytes, ByteSource
from parquet_keytools.key_service import NewFileKeys
from parquet_keytools.keys.key_material import KeyMaterial
from parquet_keytools.keys.key_metadata import KeyReference, parse_key_metadata
from parquet_keytools.keys.key_unwrapper import KmsKeys
from parquet_keytools.secret_bytes import SecretBytes


def check_rekeyed(
    written: ByteSource, new: NewFileKeys, old: Footer, kms_keys: KmsKeys, *, all_modules: bool
) -> None:
    """Open a new file as its readers will, and have the KMS unwrap its keys again.

    Args:
        written: The new file.
        new: Its keys.
        old: Footer of the old file.
        kms_keys: Asks the KMS.
        all_modules: Whether to authenticate all that is encrypted; else the footer and metadata of columns alone.

    Raises:
        KeyMaterialError: What the KMS unwraps is not the key that encrypts.
        KmsError: The KMS does not unwrap a new key.
        OutputError: The new file does not have what the old one has.
        KeytoolsError: It does not authenticate, or is not what the format says.
    """
    wrapped = list(_wrapped_deks(new))
    for (dek, _), outcome in zip(wrapped, kms_keys.deks([material for _, material in wrapped]), strict=True):
        if value_or_raise(outcome) != dek:
            raise KeyMaterialError("a new key does not unwrap to itself", path=written.path)
    encryption = new.encryption
    footer = read_envelope(written).open(encryption.footer_dek, encryption.aad_prefix)
    deks = {path: key.dek for path, key in encryption.columns.items() if isinstance(key, ColumnKey)}
    for column in footer.columns:
        cipher = footer.cipher_of(column, deks.get(column.path))
        for row_group_ordinal in range(len(footer.row_groups)):
            footer.chunk_metadata(row_group_ordinal, column, cipher)
    if _content(footer) != _content(old):
        raise OutputError(f"{written.path}: the new file does not have what the old one has.")
    if all_modules:
        file_decryptor.decrypt_columns(written, _Nowhere(), footer, deks)


def _content(footer: Footer) -> tuple[object, ...]:
    rows = [row_group.num_rows for row_group in footer.row_groups]
    return footer.metadata.num_rows, rows, [leaf.path for leaf in footer.leaves]


def _wrapped_deks(new: NewFileKeys) -> Iterator[tuple[SecretBytes, KeyMaterial]]:
    """Yield the DEKs that a KMS has to do with, and their key material."""
    encryption = new.encryption
    keys = [(encryption.footer_dek, encryption.footer_key_metadata)]
    keys += [(key.dek, key.key_metadata) for key in encryption.columns.values() if isinstance(key, ColumnKey)]
    for dek, key_metadata in keys:
        parsed = parse_key_metadata(key_metadata)
        if isinstance(parsed, KeyReference) and new.key_materials is not None:
            yield dek, new.key_materials[parsed.reference]
        elif isinstance(parsed, KeyMaterial):
            yield dek, parsed


class _Nowhere:
    """Takes what is decrypted for the sake of its authentication."""

    takes_any_order = True

    def reserve(self, length: int) -> None:
        pass

    def write_at(self, offset: int, data: Bytes) -> None:
        pass
