"""pyarrow's own encryption and decryption properties, and Polars' decryption properties, for one file each.

Neither calls a KMS: keys are wrapped while encryption properties are made, and unwrapped before decryption
properties are made.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
from pyarrow import fs as pafs

from parquet_keytools import audit
from parquet_keytools.config.document import list_of_names
from parquet_keytools.config.key_policy import ChosenKey, ColumnPath
from parquet_keytools.encryption.protection import Algorithm, ColumnEncryption, FooterColumn
from parquet_keytools.errors import (
    ConfigurationError,
    KeyNotAvailableError,
    KeytoolsError,
    UnsupportedByArrowError,
    UnsupportedByPolarsError,
    value_or_raise,
)
from parquet_keytools.files.field_labels import labels_of_schema
from parquet_keytools.files.key_service import KeyService, TablePolicy
from parquet_keytools.files.opened_file import OpenedFile, columns_named
from parquet_keytools.format.file_layout import leaf_columns, read_footer_bytes
from parquet_keytools.format.structs import FileMetaData
from parquet_keytools.keys.key_wrapping import Clock, decode_master_key_id, encode_master_key_id
from parquet_keytools.keys.material_store import serialise_key_materials
from parquet_keytools.kms.client import KmsClient, WrapRequest
from parquet_keytools.runtime.threads_and_forks import ForkSafeLock, share_with_arrow
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import BufferSource, FileLocation, PartialHandler

if TYPE_CHECKING:
    import polars as pl

_ARROW_KEK_LENGTH_BITS = 128
"""Arrow's KEKs have this length, whatever the length of the DEKs."""

_FOREVER = timedelta(days=36_500)

_DECRYPTS_IN_THREADS = 20
"""Before this version of pyarrow, threads share a cipher: reads fail, or end the process (apache/arrow#43057)."""

_NOT_OF_POLARS_BYTES = 24
"""A length of AES keys that Polars does not have."""

_NAMING_OPTIONS = ("flavor", "use_compliant_nested_type", "version", "store_schema")
"""Options of a Parquet writer that can change the names of leaf columns."""


def arrow_leaf_paths(schema: pa.Schema, write_options: Mapping[str, Any] | None = None) -> list[ColumnPath]:
    """Return the paths of the leaf columns that pyarrow writes for a schema; some options change names."""
    options = {name: value for name, value in (write_options or {}).items() if name in _NAMING_OPTIONS}
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema, **options):
        pass
    footer = read_footer_bytes(BufferSource("schema", sink.getvalue()))
    metadata, _ = FileMetaData.read(footer.data)
    return [leaf.path for leaf in leaf_columns(metadata.schema)]


def arrow_limits(policy: TablePolicy, write_options: Mapping[str, Any] | None = None) -> list[str]:
    """Return what pyarrow does not support of a policy, a phrase each; empty if it supports all."""
    table = policy.table
    kinds = {key.kind for key in policy.columns.values()}
    names = {table.footer_key, *(key.key_name for key in policy.columns.values() if key.key_name)}
    kek_bits = table.effective_kek_length_bits
    all_limits = {
        "it has no AAD prefix together with KMS keys": table.aad_prefix is not None,
        f"its KEKs have 128 bits, not {kek_bits}": table.double_wrapping and kek_bits != _ARROW_KEK_LENGTH_BITS,
        "it has one key for all files of a write, and the table has keys for each value": table.has_templates,
        "it has no data keys that the caller manages": names - policy.master_key_ids.keys(),
        "it does not encrypt files with Bloom filters": (write_options or {}).get("bloom_filter_options"),
        "it shows size statistics of encrypted columns, and all key-value metadata, in a plaintext footer": (
            table.plaintext_footer
        ),
        "it replaces external key material before it replaces the file": table.key_material == "external",
        "it encrypts either all columns with the footer key or none": (
            "footer_key" in kinds and kinds != {"footer_key"}
        ),
        "it does not encrypt a footer without any column": kinds <= {"plaintext"},
    }
    limits = [limit for limit, applies in all_limits.items() if applies]
    if not limits and kinds == {"footer_key"} and not hasattr(pe.EncryptionConfiguration, "uniform_encryption"):
        # pyarrow has it from version 21 on.
        limits.append(f"version {pa.__version__} does not encrypt all columns with the footer key")
    return limits + _name_limits(policy)


def _name_limits(policy: TablePolicy) -> list[str]:
    keys_by_dotted_path: dict[str, set[ChosenKey]] = {}
    for path, key in policy.columns.items():
        keys_by_dotted_path.setdefault(".".join(path), set()).add(key)
    own = {
        dotted_path
        for dotted_path, keys in keys_by_dotted_path.items()
        if any(key.kind == "column_key" for key in keys)
    }
    limits = []
    unfit = sorted(name for name in own if set(name) & set(":;,") or name != name.strip() or not name)
    if unfit:
        limits.append(f"it cannot name the columns {', '.join(map(repr, unfit))}")
    doubtful = sorted(name for name in own if len(keys_by_dotted_path[name]) > 1)
    if doubtful:
        limits.append(f"it cannot tell the columns named {', '.join(map(repr, doubtful))} apart")
    return limits


class _WrappingKms(pe.KmsClient):  # type: ignore[misc]
    """Wraps keys for pyarrow with a KMS client."""

    def __init__(self, kms: KmsClient, instance_id: str) -> None:
        super().__init__()
        share_with_arrow(self)
        self._kms = kms
        self._instance_id = instance_id

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> str:
        key = SecretBytes(key_bytes)
        # Some tools print the variables of a traceback.
        del key_bytes
        master_key_id = self._kms.id_of_file(decode_master_key_id(master_key_identifier), self._instance_id)
        request = WrapRequest(key, master_key_id)
        return value_or_raise(self._kms.wrap_many([request])[0])


class ArrowEncryptor:
    """Makes encryption properties with pyarrow's CryptoFactory, whose KEKs serve many files.

    pyarrow's KEK cache knows neither URL nor principal. A factory belongs to this object, and so to one KMS
    client, and is replaced when the lifetime of its KEKs ends.
    """

    def __init__(self, keys: KeyService, clock: Clock) -> None:
        self.keys = keys
        self._clock = clock
        self._lock = ForkSafeLock()
        self._factories: dict[tuple[float, str, int], tuple[float, pe.CryptoFactory]] = {}

    def properties(
        self, table_name: str | None, schema: pa.Schema, location: FileLocation
    ) -> pq.FileEncryptionProperties:
        """Make encryption properties for a file that the caller writes; see `Keytools.encryption_properties`."""
        policy = self.keys.policy(table_name, arrow_leaf_paths(schema), partial(labels_of_schema, schema))
        with audit.about(location):
            return self.made_for(policy)[0]

    def made_for(self, policy: TablePolicy) -> tuple[pq.FileEncryptionProperties, tuple[Any, Any, Any]]:
        """Wrap keys, on this thread; return properties for one file, and arguments of `ParquetEncryptionConfig`.

        With these, pyarrow has all KEKs, and makes no KMS call for a data set.
        """
        limits = arrow_limits(policy)
        if limits:
            raise UnsupportedByArrowError(limits, hint="Keytools.writer and Keytools.filesystem can.")
        kms = self.keys.kms
        # `arrow_limits` refuses tables whose keys are not in a KMS.
        assert kms is not None
        instance_id = kms.instance_of(policy.master_key_ids[policy.table.footer_key])
        connection = pe.KmsConnectionConfig(kms_instance_id=instance_id)
        configuration = _encryption_configuration(policy, kms, instance_id)
        # One at a time: threads that miss pyarrow's cache together would each wrap a KEK.
        with self._lock:
            factory = self._factory(kms, instance_id, policy.table.cache_lifetime_seconds)
            properties = factory.file_encryption_properties(connection, configuration)
        return properties, (factory, connection, configuration)

    def clear_cache(self) -> None:
        """Use new KEKs from now on."""
        with self._lock:
            self._factories.clear()

    def _factory(self, kms: KmsClient, instance_id: str, lifetime_seconds: float) -> pe.CryptoFactory:
        # pyarrow keeps KEKs by the identifier of a master key in the file, which depends on the footer's KMS.
        key = (lifetime_seconds, instance_id, os.getpid())
        now = self._clock()
        made_at, factory = self._factories.get(key, (0.0, None))
        if factory is None or now >= made_at + lifetime_seconds:
            factory = pe.CryptoFactory(lambda _: _WrappingKms(kms, instance_id))
            self._factories[key] = now, factory
        return factory


def _encryption_configuration(policy: TablePolicy, kms: KmsClient, instance_id: str) -> pe.EncryptionConfiguration:
    table = policy.table
    column_keys: dict[str, list[str]] = {}

    def written(key_name: str) -> str:
        return encode_master_key_id(kms.id_in_file(policy.master_key_ids[key_name], instance_id))

    for path, key in policy.columns.items():
        if key.kind == "column_key" and key.key_name is not None:
            names = column_keys.setdefault(written(key.key_name), [])
            if ".".join(path) not in names:
                names.append(".".join(path))
    return pe.EncryptionConfiguration(
        written(table.footer_key),
        # `arrow_limits` refuses uniform encryption where pyarrow does not have it.
        **({"column_keys": column_keys} if column_keys else {"uniform_encryption": True}),
        encryption_algorithm=table.algorithm,
        double_wrapping=table.double_wrapping,
        cache_lifetime=_FOREVER,
        data_key_length_bits=table.data_key_length_bits,
    )


class _AnsweringKms(pe.KmsClient):  # type: ignore[misc]
    """Answers pyarrow from keys that were unwrapped before; makes no KMS call."""

    def __init__(self, answers: Mapping[tuple[str, str], SecretBytes | KeytoolsError]) -> None:
        super().__init__()
        share_with_arrow(self)
        self._answers = answers

    def unwrap_key(self, wrapped_key: str, master_key_identifier: str) -> bytes:
        answer = self._answers.get((wrapped_key, master_key_identifier))
        if answer is None:
            raise KeyNotAvailableError(
                "the file needs a key that was not unwrapped when its decryption properties were made.",
                hint="Name all columns that are read or filtered in decryption_properties(path, columns=[...]).",
            )
        return value_or_raise(answer).reveal()


def decryption_properties(
    keys: KeyService,
    location: FileLocation,
    columns: Sequence[str] | None,
    table_name: str | None,
    aad_prefix: str | bytes | None,
) -> pq.FileDecryptionProperties:
    """Unwrap the keys of some columns, or of all, and return properties that know these keys only."""
    opened = _opened(
        keys, location, columns, table_name, aad_prefix, _refuse_for_arrow, method="decryption_properties"
    )
    return _decryption_properties(opened)


def _opened(
    keys: KeyService,
    location: FileLocation,
    columns: Sequence[str] | None,
    table_name: str | None,
    aad_prefix: str | bytes | None,
    refuse_unfit: Callable[[OpenedFile], None],
    *,
    method: str,
) -> OpenedFile:
    """Open a file with the keys of some columns, or of all; errors of `decryption_properties`."""
    names = None if columns is None else list_of_names("columns", columns)

    def wanted(found: Sequence[FooterColumn]) -> Sequence[FooterColumn]:
        return found if names is None else [column for name in names for column in columns_named(found, name)]

    (opened,) = keys.open_files([location], table_name, aad_prefix, wanted=wanted)
    refuse_unfit(opened)
    for name in names or ():
        if not columns_named(opened.footer.columns, name):
            raise ValueError(f"{location} has no column {name!r}")
    hint = f"Name the columns that you need: {method}(path, columns=[...])." if names is None else ""
    opened.refuse_denied(names, hint=hint)
    return opened


def _refuse_for_arrow(opened: OpenedFile) -> None:
    if limits := _decryption_limits(opened):
        raise UnsupportedByArrowError(limits, hint="Keytools.read_table can read it.")


def _decryption_limits(opened: OpenedFile) -> list[str]:
    """Return why pyarrow cannot decrypt a file, a phrase each; empty if it can."""
    limits = []
    if int(pa.__version__.partition(".")[0]) < _DECRYPTS_IN_THREADS:
        limits.append(f"version {pa.__version__} does not decrypt correctly in several threads")
    if opened.digests is not None:
        limits.append("it shows values, and `denied_columns: hash` is set")
    uses_data_keys = opened.retriever.uses_data_keys
    has_own_keys = any(column.encryption is ColumnEncryption.COLUMN_KEY for column in opened.footer.columns)
    if uses_data_keys and (has_own_keys or opened.kms_keys.answers):
        limits.append("it has no data keys for single columns")
    if opened.footer.envelope.supply_aad_prefix and not uses_data_keys:
        limits.append("it has no AAD prefix together with KMS keys")
    if not limits and uses_data_keys and not hasattr(pe, "create_decryption_properties"):
        limits.append(f"version {pa.__version__} has no data keys that the caller manages")
    # pyarrow takes the path that external key material lies beside from version 23 on.
    parameters = inspect.signature(pe.CryptoFactory.file_decryption_properties).parameters
    if not limits and opened.retriever.key_materials is not None and "parquet_file_path" not in parameters:
        limits.append(f"version {pa.__version__} does not read external key material")
    return limits


def _decryption_properties(opened: OpenedFile) -> pq.FileDecryptionProperties:
    if opened.retriever.uses_data_keys:
        envelope = opened.footer.envelope
        dek = opened.retriever.footer_dek(envelope.key_metadata)
        return pe.create_decryption_properties(
            dek.reveal(), aad_prefix=opened.footer.aad_prefix if envelope.supply_aad_prefix else None
        )
    place: tuple[Any, ...] = ()
    if opened.retriever.key_materials is not None:
        material = serialise_key_materials(opened.retriever.key_materials)
        place = opened.location.name, pafs.PyFileSystem(_KnownMaterial(material))
    answers = opened.kms_keys.answers
    kms = _AnsweringKms(
        {
            (wrapped_key, written_id): answers[wrapped_key, master_key_id]
            for (wrapped_key, written_id), master_key_id in opened.retriever.written_ids.items()
            if (wrapped_key, master_key_id) in answers
        }
    )
    # Without an instance, pyarrow takes it from the file, which may lack it.
    connection = pe.KmsConnectionConfig(kms_instance_id="DEFAULT", kms_instance_url="DEFAULT")
    return pe.CryptoFactory(lambda _: kms).file_decryption_properties(
        connection, pe.DecryptionConfiguration(cache_lifetime=_FOREVER), *place
    )


class _KnownMaterial(PartialHandler):
    """Gives pyarrow the key material from which the keys were unwrapped, whatever lies beside the file by now."""

    def __init__(self, material: bytes) -> None:
        self._material = material
        share_with_arrow(self)

    def get_type_name(self) -> str:
        """Return its name."""
        return "key material"

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        """Return the info of the key material, which is the only file."""
        return [pafs.FileInfo(path, pafs.FileType.File, size=len(self._material)) for path in paths]

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open the key material."""
        return pa.BufferReader(self._material)


# --- Polars ---


def polars_decryption(
    keys: KeyService,
    location: FileLocation,
    columns: Sequence[str] | None,
    table_name: str | None,
    aad_prefix: str | bytes | None,
) -> pl.ParquetDecryptionProperties:
    """Unwrap the keys of some columns, or of all, for Polars' own reader; see `Keytools.polars_decryption`."""
    try:
        from polars import ParquetDecryptionProperties
    except ImportError:
        raise ConfigurationError(
            "Polars is not installed, or is too old to decrypt Parquet files.", hint="pip install -U polars"
        ) from None
    opened = _opened(
        keys, location, columns, table_name, aad_prefix, _refuse_for_polars, method="polars_decryption"
    )
    return ParquetDecryptionProperties(
        footer_key=opened.retriever.footer_dek(opened.footer.key_metadata).reveal(),
        column_keys={".".join(path): dek.reveal() for path, dek in opened.deks.items()},
        # A stored prefix, too: with it, Polars refuses a file that stores another one.
        aad_prefix=opened.footer.aad_prefix or None,
    )


def _refuse_for_polars(opened: OpenedFile) -> None:
    opened.refuse_unencrypted()
    deks = (opened.retriever.footer_dek(opened.footer.key_metadata), *opened.deks.values())
    names = {".".join(path) for path in opened.deks}
    all_limits = {
        "it shows values, and `denied_columns: hash` is set": opened.digests is not None,
        "it decrypts AES_GCM_V1 only": opened.footer.algorithm is not Algorithm.AES_GCM_V1,
        "it has no data keys of 192 bits": any(len(dek) == _NOT_OF_POLARS_BYTES for dek in deks),
        "it cannot tell columns apart whose dotted paths are the same": len(names) < len(opened.deks),
    }
    if limits := [limit for limit, applies in all_limits.items() if applies]:
        raise UnsupportedByPolarsError(limits, hint="Keytools.scan_polars can read it.")
