"""pyarrow's decryption properties for one file, for people who call pyarrow's own readers."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from parquet_keytools.arrow.callbacks import MaterialFolder
from parquet_keytools.arrow.encryption_properties import (
    FOREVER,
    NO_ARROW_ENCRYPTION,
    arrow_encryption,
    has_arrow_encryption,
    takes_file_path,
)
from parquet_keytools.config.document import list_of_names
from parquet_keytools.encryption.protection import ColumnEncryption, FooterColumn
from parquet_keytools.errors import UnsupportedByArrowError
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.opened_file import OpenedFile, columns_named
from parquet_keytools.keys.material_store import serialise_key_materials
from parquet_keytools.storage.locations import FileLocation, key_material_location

_DECRYPTS_IN_THREADS = 20
"""Before this version of pyarrow, threads share a cipher: reads fail, or end the process (apache/arrow#43057)."""


def decryption_properties(
    keys: KeyService,
    location: FileLocation,
    columns: Sequence[str] | None,
    table_name: str | None,
    aad_prefix: str | bytes | None,
) -> pq.FileDecryptionProperties:
    """Unwrap the keys of some columns, or of all, and return properties that know these keys only.

    Raises:
        UnsupportedByArrowError: pyarrow cannot decrypt the file by itself.
        ColumnAccessDeniedError: One of the columns cannot be read.
        ValueError: The file has no column of a name.
    """
    names = None if columns is None else list_of_names("columns", columns)

    def wanted(found: Sequence[FooterColumn]) -> Sequence[FooterColumn]:
        return found if names is None else [column for name in names for column in columns_named(found, name)]

    (opened,) = keys.open_files([location], table_name, aad_prefix, wanted=wanted)
    limits = _limits(opened)
    if limits:
        raise UnsupportedByArrowError(limits, hint="Keytools.read_table can read it.")
    for name in names or ():
        if not opened.columns_named(name):
            raise ValueError(f"{location} has no column {name!r}")
    hint = "Name the columns that you need: decryption_properties(path, columns=[...])." if names is None else ""
    opened.refuse_denied(names, hint=hint)
    return _properties(opened)


def _limits(opened: OpenedFile) -> list[str]:
    """Return why pyarrow cannot decrypt a file by itself, a phrase each; empty if it can."""
    limits = [] if has_arrow_encryption() else [NO_ARROW_ENCRYPTION]
    if int(pa.__version__.partition(".")[0]) < _DECRYPTS_IN_THREADS:
        limits.append(f"version {pa.__version__} does not decrypt correctly in several threads")
    if opened.digests is not None:
        limits.append("it shows values, and `denied_columns: hash` is set")
    has_own_keys = any(column.encryption is ColumnEncryption.COLUMN_KEY for column in opened.footer.columns)
    if opened.retriever.uses_data_keys and (has_own_keys or opened.kms_keys.answers):
        limits.append("it has no data keys for single columns")
    if opened.footer.envelope.supply_aad_prefix and not opened.retriever.uses_data_keys:
        limits.append("it has no AAD prefix together with KMS keys")
    if (
        not limits
        and opened.retriever.uses_data_keys
        and not hasattr(arrow_encryption(), "create_decryption_properties")
    ):
        limits.append(f"version {pa.__version__} has no data keys that the caller manages")
    if not limits and opened.retriever.key_materials is not None and not takes_file_path():
        limits.append(f"version {pa.__version__} does not read external key material")
    return limits


def _properties(opened: OpenedFile) -> pq.FileDecryptionProperties:
    from parquet_keytools.arrow.arrow_kms import AnsweringKms, pe

    if opened.retriever.uses_data_keys:
        envelope = opened.footer.envelope
        dek = opened.retriever.footer_dek(envelope.key_metadata)
        return pe.create_decryption_properties(
            dek.reveal(), aad_prefix=opened.footer.aad_prefix if envelope.supply_aad_prefix else None
        )
    folder = MaterialFolder()
    if opened.retriever.key_materials is not None:
        name = key_material_location(opened.location).name
        folder.contents[name] = serialise_key_materials(opened.retriever.key_materials)
    kms = AnsweringKms(opened.kms_keys.answers)
    # Without an instance Arrow takes it from the file, which may lack it.
    connection = pe.KmsConnectionConfig(kms_instance_id="DEFAULT", kms_instance_url="DEFAULT")
    place = (opened.location.name, pafs.PyFileSystem(folder)) if takes_file_path() else ()
    return pe.CryptoFactory(lambda _: kms).file_decryption_properties(
        connection, pe.DecryptionConfiguration(cache_lifetime=FOREVER), *place
    )
