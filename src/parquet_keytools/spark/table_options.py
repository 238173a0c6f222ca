"""Tables and Spark: what one asks for as options of a write, and files that a JVM saw compared with theirs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote_plus

from parquet_keytools.config.document import list_of_names
from parquet_keytools.config.key_policy import ColumnPath, KeyReference, MasterKeyReference
from parquet_keytools.config.settings import Configuration
from parquet_keytools.encryption.protection import Algorithm, ColumnEncryption
from parquet_keytools.errors import ConfigurationError, UnsupportedBySparkError
from parquet_keytools.files.key_service import KeyService, TablePolicy
from parquet_keytools.files.table_check import SeenColumn, TableCheck, refuse_values_of_folders
from parquet_keytools.keys.key_wrapping import decode_master_key_id, encode_master_key_id
from parquet_keytools.spark.session import (
    AAD_PREFIX,
    FACTORY_OPTIONS,
    TABLE,
    cache_name,
    refuse_digests_in_spark,
    table_aad_prefix,
)
from parquet_keytools.spark.transport import carried, configuration_identity

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

_HINT = "`parquet-keytools spark encrypt` can: let Spark write plaintext files, and encrypt these."


def table_options(
    keys: KeyService, table_name: str | None, leaves: Sequence[ColumnPath], partition_by: Sequence[str]
) -> dict[str, str]:
    """Return the options; see `Keytools.spark_options`."""
    partition_by = list_of_names("partition_by", partition_by)
    if partition_by:
        unknown = set(partition_by) - {path[0] for path in leaves}
        if unknown:
            raise ConfigurationError(f"the frame has no columns {', '.join(map(repr, sorted(unknown)))}.")
        keys.policy(table_name, leaves).check_partition_columns(partition_by)
    written = [path for path in leaves if path[0] not in partition_by]
    policy = keys.policy(table_name, written)
    reasons = spark_limits(policy)
    if reasons:
        raise UnsupportedBySparkError(reasons, hint=_HINT)
    return _key_options(policy) | _other_options(keys.configuration, policy, written)


def read_options(configuration: Configuration, table_name: str | None) -> dict[str, str]:
    """Return the options of a read; see `Keytools.spark_read_options`."""
    refuse_digests_in_spark(configuration)
    name, _ = configuration.select_table(table_name)
    options = {
        # Else a session that was not configured would read plaintext files in place of encrypted ones.
        **FACTORY_OPTIONS,
        TABLE: name,
    }
    prefix = table_aad_prefix(configuration, name)
    if prefix is not None:
        options[AAD_PREFIX] = prefix
    return options


def spark_limits(policy: TablePolicy) -> list[str]:
    """Return what parquet-java cannot do of what a table asks for, one sentence each."""
    table = policy.table
    reasons = []
    if table.aad_prefix is not None:
        reasons.append("it does not support an AAD prefix together with keys from a KMS")
    if len(policy.master_key_ids) < len({name for _, name in table.key_uses()}):
        reasons.append("it does not support data keys that the caller manages")
    if table.plaintext_footer:
        reasons.append("its plaintext footers show size statistics of encrypted columns")
    if table.key_material == "external":
        reasons.append("its external key material can be left behind when a committer moves the files")
    column_keys = [path for path, key in policy.columns.items() if key.kind == "column_key"]
    if not column_keys and table.unlisted_columns != "footer_key":
        reasons.append("it does not encrypt the footer alone")
    for path in column_keys:
        if any(_cannot_be_listed(name) for name in path):
            reasons.append(f"its list of column keys cannot hold the column name {'.'.join(path)!r}")
    return reasons


def _cannot_be_listed(name: str) -> bool:
    # The list is written with `:;,`, its paths with dots; Java trims each, and Hadoop replaces `${...}`.
    return any(mark in name for mark in ".:;,") or "${" in name or name != name.strip() or not name.isprintable()


def _key_options(policy: TablePolicy) -> dict[str, str]:
    table = policy.table
    footer_key = _listed_id(policy.master_key_ids[table.footer_key])
    column_keys: dict[str, list[str]] = {}
    for path, key in policy.columns.items():
        if key.kind == "column_key" and key.key_name is not None:
            column_keys.setdefault(_listed_id(policy.master_key_ids[key.key_name]), []).append(".".join(path))
    if not column_keys:
        return {"parquet.encryption.uniform.key": footer_key}
    return {
        "parquet.encryption.footer.key": footer_key,
        "parquet.encryption.column.keys": ";".join(f"{key}:{','.join(c)}" for key, c in column_keys.items()),
        "parquet.encryption.complete.columns": str(table.unlisted_columns == "footer_key").lower(),
    }


def _other_options(
    configuration: Configuration, policy: TablePolicy, written: Sequence[ColumnPath]
) -> dict[str, str]:
    table = policy.table
    options = {
        # Else a session that was not configured would write plaintext, and so would one that inserts into a
        # catalog table with these options.
        **FACTORY_OPTIONS,
        "parquet.encryption.algorithm": table.algorithm,
        "parquet.encryption.plaintext.footer": "false",
        "parquet.encryption.data.key.length.bits": str(table.data_key_length_bits),
        "parquet.encryption.double.wrapping": str(table.double_wrapping).lower(),
        "parquet.encryption.key.material.store.internally": "true",
        "parquet.encryption.cache.lifetime.seconds": str(int(table.cache_lifetime_seconds)),
        TABLE: policy.table_name,
        "parquet.keytools.options.identity": configuration_identity(configuration),
        "parquet.keytools.columns": ",".join(quote_plus(".".join(path)) for path in written),
        # Tables share KEKs where these may be the same.
        "parquet.encryption.key.access.token": cache_name(
            carried(configuration), "writing", table.effective_kek_length_bits, table.cache_lifetime_seconds
        ),
    }
    if table.double_wrapping:
        options["parquet.encryption.kek.length.bits"] = str(table.effective_kek_length_bits)
    return options


def _listed_id(master_key_id: str) -> str:
    # Hadoop would replace `${...}`.
    return encode_master_key_id(master_key_id).replace("$", "%24")


def spark_leaf_paths(schema: StructType) -> list[ColumnPath]:
    """Return the paths of all leaf columns that Spark writes for a schema, in its order.

    They are those of Spark's writer in its normal form: not with `spark.sql.parquet.writeLegacyFormat`, and
    not with shredded variants. A file with other columns than these is refused when it is written.
    """
    return [path for field in schema.fields for path in _leaves(field.dataType, (field.name,))]


def _leaves(data_type: DataType, path: ColumnPath) -> Iterator[ColumnPath]:
    from pyspark.sql import types

    if isinstance(data_type, types.StructType):
        for field in data_type.fields:
            yield from _leaves(field.dataType, (*path, field.name))
    elif isinstance(data_type, types.ArrayType):
        yield from _leaves(data_type.elementType, (*path, "list", "element"))
    elif isinstance(data_type, types.MapType):
        yield from _leaves(data_type.keyType, (*path, "key_value", "key"))
        yield from _leaves(data_type.valueType, (*path, "key_value", "value"))
    elif isinstance(data_type, types.UserDefinedType):
        yield from _leaves(data_type.sqlType(), path)
    elif isinstance(data_type, getattr(types, "VariantType", ())):  # From Spark 4.0 on.
        yield (*path, "value")
        yield (*path, "metadata")
    else:
        yield path


# --- files that a JVM saw ---


class TableRequests:
    """Compares files with the tables of one configuration; `CheckedFile.java` is the other side.

    A request is a JSON object: `table`, empty where the reader named none; `file`, for messages; `algorithm`;
    `footer_key`, the footer's master key as the file names it; and `columns`, once the footer is authentic: each a
    path, a kind of encryption, and a master key or null; and with these `folders`, the names of columns that
    folders above the file give values to. May be used by any number of threads.
    """

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._checks: dict[str, TableCheck] = {}

    def check(self, content: bytes) -> bytes:
        """Refuse a file that is not what its table says. Without tables there is nothing to compare with.

        Returns:
            The AAD prefix that its table has, `{file_name}` in it; empty where it has none.

        Raises:
            TableMismatchError: It is not.
            FolderNameError: A folder gives values to a column that is under a key.
            ConfigurationError: There is no such table, or none was named and there are several.
            ValueError: The content is no such request.
        """
        request = json.loads(content)
        columns = [_column(*column) for column in request.get("columns", [])]
        folders = {name: f"{name}=..." for name in request.get("folders", [])}
        encrypted = [column.path for column in columns if column.encryption is not ColumnEncryption.PLAINTEXT]
        if not self._configuration.tables:
            refuse_values_of_folders(request["file"], folders, encrypted, None)
            return b""
        check = self._check_of(request["table"], request["file"])
        algorithm = Algorithm(request["algorithm"])
        footer_key = _key(request["footer_key"])
        mismatches = check.footer_mismatches(algorithm, footer_key)
        check.refuse(request["file"], [*mismatches, *check.column_mismatches(footer_key, columns)])
        keyed = [(name,) for name in check.keyed(folders)]
        refuse_values_of_folders(request["file"], folders, [*encrypted, *keyed], check)
        return (table_aad_prefix(self._configuration, check.table_name) or "").encode()

    def _check_of(self, table_name: str, file: str) -> TableCheck:
        if not table_name and len(self._configuration.tables) > 1:
            raise ConfigurationError(
                f"{file} is read without a table, and the configuration has {len(self._configuration.tables)}.",
                hint='Give the read the options of its table: .options(**keytools.spark_read_options("TABLE")).',
            )
        check = self._checks.get(table_name)
        if check is None:
            name, _ = self._configuration.select_table(table_name or None)
            check = self._checks[table_name] = TableCheck(self._configuration, name, ignores_case=True)
        return check


def _key(master_key_id: str) -> KeyReference:
    return MasterKeyReference(decode_master_key_id(master_key_id))


def _column(path: list[str], kind: str, master_key_id: Any) -> SeenColumn:
    if kind not in ColumnEncryption.__members__:
        raise ValueError("there is no such kind of encryption")
    return SeenColumn(tuple(path), ColumnEncryption[kind], None if master_key_id is None else _key(master_key_id))
