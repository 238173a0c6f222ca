"""Writing encrypted files and data sets with pyarrow."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from parquet_keytools.arrow.encryption_properties import (
    ArrowEncryptor,
    arrow_limits,
    encryption_configuration,
)
from parquet_keytools.arrow.output_filesystem import Encrypt, Finish, PendingHandler
from parquet_keytools.key_service import TablePolicy
from parquet_keytools.keys.material_store import remove_key_materials, write_key_materials
from parquet_keytools.storage import BufferSource, FileLocation, exclusive_folder, whole_output, written_meanwhile

_log = logging.getLogger(__name__)

PolicyOf = Callable[[pa.Schema], TablePolicy]
"""Returns what a table asks for, for a schema."""


@dataclass(frozen=True)
class WriteResult:
    """How a table was written.

    Attributes:
        path: Where.
        engine: What encrypted it.
        reasons: Why pyarrow could not, a phrase each; empty where it did.
        size_bytes: Length of the file.
    """

    path: str
    engine: Literal["pyarrow", "module encryptor"]
    reasons: tuple[str, ...]
    size_bytes: int


def write_table(
    table: pa.Table,
    target: FileLocation,
    policy: TablePolicy,
    encryptor: ArrowEncryptor | None,
    encrypt: Encrypt,
    options: dict[str, Any],
) -> WriteResult:
    """Write one file, whole or not at all; see `Keytools.write_table`."""
    if "metadata_collector" in options:
        raise TypeError("metadata_collector is not taken: it would give away the statistics of encrypted columns")
    reasons = arrow_limits(policy, options)
    if policy.table.plaintext_footer:
        reasons.append("it shows size statistics of encrypted columns in a plaintext footer")
    if policy.table.key_material == "external" and target.info().type != pafs.FileType.NotFound:
        # Two files cannot be replaced at once; the module encryptor writes key material that fits both the
        # old and the new Parquet file.
        reasons.append("its external key material cannot replace that of a file that is there")
    finish: Finish = functools.partial(remove_key_materials, target)
    with contextlib.ExitStack() as replacement:
        with whole_output(target) as pending:
            if reasons or encryptor is None:
                buffer = pa.BufferOutputStream()
                pq.write_table(table, buffer, **options)
                place = encrypt(BufferSource(str(target), buffer.getvalue()), pending)
                replacement.enter_context(exclusive_folder(target))
                finish = place()
            else:
                encryption = encryptor.encryption(policy, target.name)
                pq.write_table(
                    table,
                    pending.location.path,
                    filesystem=pending.location.filesystem,
                    encryption_properties=encryption.properties,
                    **options,
                )
                replacement.enter_context(exclusive_folder(target))
                if encryption.key_materials is not None:
                    if target.info().type != pafs.FileType.NotFound:
                        raise written_meanwhile(target)
                    write_key_materials(target, encryption.key_materials)
                    finish = _nothing
        finish()
    result = WriteResult(
        str(target), "module encryptor" if reasons else "pyarrow", tuple(reasons), target.info().size
    )
    _log.info("%s was encrypted by %s%s", target, result.engine, _because(reasons))
    return result


def write_dataset(
    data: Any,
    folder: FileLocation,
    policy_of: PolicyOf,
    encryptor: ArrowEncryptor | None,
    encrypt: Encrypt,
    wrap_keks: Callable[[TablePolicy], None],
    *,
    partitioning: Any,
    partitioning_flavor: str | None,
    write_options: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Write a data set; see `Keytools.write_dataset`."""
    schema = data.schema if hasattr(data, "schema") else options.get("schema")
    if schema is None:
        schema = ds.dataset(data).schema
    partitioning, partition_names = _partitioning(partitioning, partitioning_flavor, schema)
    if "file_visitor" in options:
        raise TypeError("file_visitor is not taken: it would give away the statistics of encrypted columns")
    if partition_names:
        policy_of(schema).check_partition_columns(partition_names)
    policy = policy_of(pa.schema([field for field in schema if field.name not in partition_names]))
    reasons = arrow_limits(policy, write_options)
    if policy.table.plaintext_footer:
        reasons.append("it shows size statistics of encrypted columns in a plaintext footer")
    if not policy.table.double_wrapping:
        reasons.append("it would call the KMS while it writes a data set with single wrapping")
    if policy.table.key_material == "external":
        reasons.append("its external key material would be there before the files")
    file_format = ds.ParquetFileFormat()
    if reasons or encryptor is None:
        # What the KMS refuses, it refuses before Arrow's threads start.
        wrap_keks(policy)
        file_options = file_format.make_write_options(**write_options)
        handler = PendingHandler(folder.filesystem, encrypt)
    else:
        factory = encryptor.primed_factory(policy)
        connection = encryptor.connection_config()
        config = ds.ParquetEncryptionConfig(factory, connection, encryption_configuration(policy))
        file_options = file_format.make_write_options(encryption_config=config, **write_options)
        handler = PendingHandler(folder.filesystem, None)
    _log.info(
        "%s is encrypted by %s%s", folder, "the module encryptor" if reasons else "pyarrow", _because(reasons)
    )
    try:
        ds.write_dataset(
            data,
            folder.path,
            format=file_format,
            filesystem=pafs.PyFileSystem(handler),
            file_options=file_options,
            partitioning=partitioning,
            **options,
        )
        handler.commit()
    except BaseException:
        handler.discard()
        raise


def _partitioning(
    partitioning: Any, flavor: str | None, schema: pa.Schema
) -> tuple[ds.Partitioning | None, frozenset[str]]:
    """Return the partitioning, hive-style where only names are given, and the names of its fields."""
    if partitioning is None:
        return None, frozenset()
    if isinstance(partitioning, (list, tuple)):
        fields = pa.schema([schema.field(name) for name in partitioning])
        partitioning = ds.partitioning(fields, flavor=flavor or "hive")
    return partitioning, frozenset(partitioning.schema.names)


def _because(reasons: list[str]) -> str:
    return f", for pyarrow cannot: {'; '.join(reasons)}" if reasons else ""


def _nothing() -> None:
    """Nothing is left to do."""
