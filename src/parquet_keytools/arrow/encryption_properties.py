"""pyarrow's encryption properties for one file, from a table of the configuration."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from parquet_keytools import audit
from parquet_keytools.arrow.callbacks import MaterialFolder
from parquet_keytools.config.key_policy import ChosenKey, ColumnPath
from parquet_keytools.errors import OutputError, UnsupportedByArrowError
from parquet_keytools.files.key_service import KeyService, TablePolicy
from parquet_keytools.format.file_layout import leaf_columns, read_footer_bytes
from parquet_keytools.format.structs import FileMetaData
from parquet_keytools.keys.kek import Clock
from parquet_keytools.keys.key_material import KeyMaterial
from parquet_keytools.keys.key_wrapping import encode_master_key_id
from parquet_keytools.keys.material_store import parse_key_materials, write_key_materials
from parquet_keytools.runtime.fork_safety import ForkSafeLock
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.sources import BufferSource

if TYPE_CHECKING:
    import pyarrow.parquet.encryption as pe

ARROW_KEK_LENGTH_BITS = 128
"""Arrow's KEKs have this length, whatever the length of the DEKs."""

FOREVER = timedelta(days=36_500)

_NAMING_OPTIONS = ("flavor", "use_compliant_nested_type", "version", "store_schema")
"""Options of a Parquet writer that can change the names of leaf columns."""


def arrow_leaf_paths(schema: pa.Schema, write_options: Mapping[str, Any] | None = None) -> list[ColumnPath]:
    """Return the paths of the leaf columns that pyarrow writes for a schema, in the order of their ordinals.

    Some options of the writer change names.
    """
    options = {name: value for name, value in (write_options or {}).items() if name in _NAMING_OPTIONS}
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema, **options):
        pass
    footer = read_footer_bytes(BufferSource("schema", sink.getvalue()))
    metadata, _ = FileMetaData.read(footer.data)
    return [leaf.path for leaf in leaf_columns(metadata.schema)]


def arrow_limits(policy: TablePolicy, write_options: Mapping[str, Any] | None = None) -> list[str]:
    """Return what of a policy pyarrow's encryption properties cannot do, a phrase each; empty if they can."""
    table = policy.table
    limits = [] if has_arrow_encryption() else [NO_ARROW_ENCRYPTION]
    if table.aad_prefix is not None:
        limits.append("it has no AAD prefix together with KMS keys")
    if table.double_wrapping and table.effective_kek_length_bits != ARROW_KEK_LENGTH_BITS:
        limits.append(f"its KEKs have 128 bits, not {table.effective_kek_length_bits}")
    names = {table.footer_key, *(key.key_name for key in policy.columns.values() if key.key_name)}
    if names - policy.master_key_ids.keys():
        limits.append("it has no data keys that the caller manages")
    if (write_options or {}).get("bloom_filter_options"):
        limits.append("it does not encrypt files with Bloom filters")
    kinds = {key.kind for key in policy.columns.values()}
    if table.plaintext_footer:
        limits.append(
            "it shows size statistics of encrypted columns, and all key-value metadata, in a plaintext footer"
        )
    if "footer_key" in kinds and kinds != {"footer_key"}:
        limits.append("it encrypts either all columns with the footer key or none")
    if not limits and kinds == {"footer_key"} and not _encrypts_uniformly():
        limits.append(f"version {pa.__version__} does not encrypt all columns with the footer key")
    if not limits and table.key_material == "external" and not takes_file_path():
        limits.append(f"version {pa.__version__} does not write external key material")
    if kinds <= {"plaintext"}:
        limits.append("it does not encrypt a footer without any column")
    limits += _name_limits(policy)
    return limits


NO_ARROW_ENCRYPTION = "it was built without encryption"


@functools.cache
def has_arrow_encryption() -> bool:
    """Tell whether this pyarrow was built with encryption."""
    try:
        arrow_encryption()
    except ImportError:
        return False
    return True


def arrow_encryption() -> Any:
    """Return `pyarrow.parquet.encryption`, which a pyarrow that was built without encryption cannot import."""
    return importlib.import_module("pyarrow.parquet.encryption")


def _encrypts_uniformly() -> bool:
    """Return whether pyarrow can encrypt all columns with the footer key: it can from version 21 on."""
    return hasattr(arrow_encryption().EncryptionConfiguration, "uniform_encryption")


@functools.cache
def takes_file_path() -> bool:
    """Return whether pyarrow takes the path that external key material lies beside: it does from version 23 on."""
    method = arrow_encryption().CryptoFactory.file_encryption_properties
    return "parquet_file_path" in inspect.signature(method).parameters


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


class ArrowEncryptor:
    """Makes encryption properties with pyarrow's CryptoFactory; its KEKs serve many files.

    A CryptoFactory belongs to this object, and so to one KMS client: its cache, which knows neither URL nor
    principal, cannot mix them up. It is replaced when its KEKs have been used for as long as they may be.
    """

    def __init__(self, keys: KeyService, clock: Clock) -> None:
        self.keys = keys
        self._clock = clock
        self._lock = ForkSafeLock()
        self._factories: dict[tuple[float, int], tuple[float, pe.CryptoFactory]] = {}

    def properties(
        self, table_name: str | None, schema: pa.Schema, location: FileLocation
    ) -> pq.FileEncryptionProperties:
        """Make encryption properties for a file that the caller writes; see `Keytools.encryption_properties`."""
        policy = self.keys.policy(table_name, arrow_leaf_paths(schema))
        if policy.table.key_material == "external" and location.info().type != pafs.FileType.NotFound:
            raise OutputError(
                f"{location} is there: it would lose its key material before it is replaced.",
                hint="Use Keytools.write_table, which replaces both safely, or remove the file first.",
            )
        with audit.about(location):
            properties, key_materials = self.encryption(policy, location.name)
        if key_materials is not None:
            write_key_materials(location, key_materials)
        return properties

    def encryption(
        self, policy: TablePolicy, file_name: str
    ) -> tuple[pq.FileEncryptionProperties, dict[str, KeyMaterial] | None]:
        """Make encryption properties for one file; wraps keys, on this thread.

        Returns:
            What is given to pyarrow for one file; two files would share DEKs and file unique. And external key
            material to be written beside the file; None where it is internal.

        Raises:
            UnsupportedByArrowError: pyarrow cannot do what the table asks for.
            KmsError: A key cannot be wrapped.
        """
        _, properties, folder = self._make(policy, file_name)
        if policy.table.key_material == "internal":
            return properties, None
        (content,) = folder.contents.values()
        return properties, parse_key_materials(content, file_name)

    def primed_factory(self, policy: TablePolicy) -> pe.CryptoFactory:
        """Return a CryptoFactory that has all KEKs of a table, and so will not call the KMS while it writes."""
        factory, _, _ = self._make(policy, "primed.parquet")
        return factory

    def _make(
        self, policy: TablePolicy, file_name: str
    ) -> tuple[pe.CryptoFactory, pq.FileEncryptionProperties, MaterialFolder]:
        limits = arrow_limits(policy)
        if limits:
            raise UnsupportedByArrowError(limits, hint="Keytools.writer and Keytools.filesystem can.")
        folder = MaterialFolder()
        # One at a time: Arrow holds a lock of its own while it calls back, and threads that miss its cache
        # together would each wrap a KEK.
        with self._lock:
            factory = self._factory(policy.table.cache_lifetime_seconds)
            place = (file_name, pafs.PyFileSystem(folder)) if takes_file_path() else ()
            properties = factory.file_encryption_properties(
                self.connection_config(), encryption_configuration(policy), *place
            )
        return factory, properties, folder

    def connection_config(self) -> pe.KmsConnectionConfig:
        """Return what Arrow writes into the footer's key material of the KMS."""
        from parquet_keytools.arrow.arrow_kms import pe

        settings = self.keys.configuration.kms
        return pe.KmsConnectionConfig(kms_instance_id="DEFAULT" if settings is None else settings.instance_id)

    def clear_cache(self) -> None:
        """Use fresh KEKs from now on."""
        with self._lock:
            self._factories.clear()

    def _factory(self, lifetime_seconds: float) -> pe.CryptoFactory:
        key = (lifetime_seconds, os.getpid())
        now = self._clock()
        made_at, factory = self._factories.get(key, (0.0, None))
        if factory is None or now >= made_at + lifetime_seconds:
            from parquet_keytools.arrow.arrow_kms import WrappingKms, pe

            kms = self.keys.kms
            # A table whose keys are not in a KMS is not for Arrow (`arrow_limits`).
            assert kms is not None
            factory = pe.CryptoFactory(lambda _: WrappingKms(kms))
            self._factories = {key: (now, factory)} | {
                other: value for other, value in self._factories.items() if other[1] == key[1] and other != key
            }
        return factory


def encryption_configuration(policy: TablePolicy) -> pe.EncryptionConfiguration:
    """Return pyarrow's configuration for a policy that it can do."""
    from parquet_keytools.arrow.arrow_kms import pe

    table = policy.table
    column_keys: dict[str, list[str]] = {}
    for path, key in policy.columns.items():
        if key.kind == "column_key" and key.key_name is not None:
            names = column_keys.setdefault(encode_master_key_id(policy.master_key_ids[key.key_name]), [])
            if ".".join(path) not in names:
                names.append(".".join(path))
    return pe.EncryptionConfiguration(
        encode_master_key_id(policy.master_key_ids[table.footer_key]),
        # A version that has no uniform encryption is never asked for it (`arrow_limits`).
        **({"column_keys": column_keys} if column_keys else {"uniform_encryption": True}),
        encryption_algorithm=table.algorithm,
        plaintext_footer=table.plaintext_footer,
        double_wrapping=table.double_wrapping,
        cache_lifetime=FOREVER,
        internal_key_material=table.key_material == "internal",
        data_key_length_bits=table.data_key_length_bits,
    )
