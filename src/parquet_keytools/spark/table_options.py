"""Tables and Spark: options of a write, and the writes and files of a JVM compared with their table."""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote_plus, unquote_plus, urlencode

from parquet_keytools.config.document import list_of_names
from parquet_keytools.config.key_policy import ColumnPath, KeyReference, MasterKeyReference, keys_of_value
from parquet_keytools.config.labels import FieldLabels
from parquet_keytools.config.settings import Configuration
from parquet_keytools.encryption.aad import aad_prefixes, expected_aad_prefix, filled_prefix
from parquet_keytools.encryption.protection import Algorithm, ColumnEncryption
from parquet_keytools.errors import ConfigurationError, UnsupportedBySparkError
from parquet_keytools.files.field_labels import labels_of_spark
from parquet_keytools.files.key_service import KeyService, TablePolicy
from parquet_keytools.files.table_check import SeenColumn, TableCheck, refuse_values_of_folders, values_in_footer
from parquet_keytools.keys.key_wrapping import decode_master_key_id, encode_master_key_id
from parquet_keytools.kms.client import KmsClient
from parquet_keytools.spark.session import (
    FACTORY_OPTIONS,
    KMS_INSTANCE,
    TABLE,
    cache_name,
    carried,
    refuse_digests_in_spark,
)

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

_COLUMNS = "parquet.keytools.columns"
_KEY_VALUES = "parquet.keytools.key.values"
_CACHE_NAME = "parquet.encryption.key.access.token"
_COLUMN_KEYS = "parquet.encryption.column.keys"
_KEY_OPTIONS = (
    "parquet.encryption.uniform.key",
    "parquet.encryption.footer.key",
    _COLUMN_KEYS,
    "parquet.encryption.complete.columns",
)
_NOT_COMPARED = {*FACTORY_OPTIONS, *_KEY_OPTIONS, _CACHE_NAME}
_SHREDDING = "spark.sql.variant.infershreddingschema"
_HINT = "`parquet-keytools spark encrypt` can: let Spark write plaintext files, and encrypt these."


def table_options(
    keys: KeyService,
    table_name: str | None,
    leaves: Sequence[ColumnPath],
    partition_by: Sequence[str],
    field_labels: FieldLabels,
    key_values: Mapping[str, str],
) -> dict[str, str]:
    """Return the options; see `Keytools.spark_options`."""
    partition_by = list_of_names("partition_by", partition_by)
    if partition_by:
        unknown = set(partition_by) - {path[0] for path in leaves}
        if unknown:
            raise ConfigurationError(f"the frame has no columns {', '.join(map(repr, sorted(unknown)))}.")
        keys.policy(table_name, leaves, field_labels).check_partition_columns(partition_by)
    written = [path for path in leaves if path[0] not in partition_by]
    policy = keys.policy(table_name, written, field_labels, key_values)
    keys_of_value(keys.configuration, policy.table_name, key_values)
    reasons = spark_limits(policy)
    if reasons:
        raise UnsupportedBySparkError(reasons, hint=_HINT)
    # A configuration that executors cannot have is refused here, before a job starts.
    carried(keys.configuration)
    # `spark_limits` refuses tables whose keys are not in a KMS.
    assert keys.kms is not None
    return _key_options(policy, keys.kms) | _other_options(policy, written, keys.kms)


def read_options(configuration: Configuration, table_name: str | None) -> dict[str, str]:
    """Return the options of a read; see `Keytools.spark_read_options`."""
    refuse_digests_in_spark(configuration)
    name, _ = configuration.select_table(table_name)
    # Without the factory, a session that was not configured would read plaintext files in place of encrypted ones.
    return {**FACTORY_OPTIONS, TABLE: name}


def spark_limits(policy: TablePolicy) -> list[str]:
    """Return why parquet-java cannot write files as a table asks for, one sentence for each reason."""
    table = policy.table
    reasons = []
    if table.aad_prefix is not None:
        reasons.append("it does not support an AAD prefix together with keys from a KMS")
    if table.value_columns:
        reasons.append("it asks for the keys of a file before it knows the values of its columns")
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
        # The list is written with `:;,`, its paths with dots; Java trims each, and Hadoop replaces `${...}`.
        if any(re.search(r"[.:;,]|\$\{|^\s|\s$", name) or not name.isprintable() for name in path):
            reasons.append(f"its list of column keys cannot hold the column name {'.'.join(path)!r}")
    return reasons


def _key_options(policy: TablePolicy, kms: KmsClient) -> dict[str, str]:
    table = policy.table
    instance_id = kms.instance_of(policy.master_key_ids[table.footer_key])

    def listed(key_name: str) -> str:
        # Hadoop would replace `${...}`.
        return encode_master_key_id(kms.id_in_file(policy.master_key_ids[key_name], instance_id)).replace(
            "$", "%24"
        )

    footer_key = listed(table.footer_key)
    column_keys: dict[str, list[str]] = {}
    for path, key in policy.columns.items():
        if key.kind == "column_key" and key.key_name is not None:
            column_keys.setdefault(listed(key.key_name), []).append(".".join(path))
    if not column_keys:
        return {"parquet.encryption.uniform.key": footer_key}
    return {
        "parquet.encryption.footer.key": footer_key,
        _COLUMN_KEYS: ";".join(f"{key}:{','.join(c)}" for key, c in column_keys.items()),
        "parquet.encryption.complete.columns": str(table.unlisted_columns == "footer_key").lower(),
    }


def _other_options(policy: TablePolicy, written: Sequence[ColumnPath], kms: KmsClient) -> dict[str, str]:
    table = policy.table
    # parquet-java keeps KEKs by the identifier of a master key in the file, which depends on the footer's KMS.
    instances = [kms.instance_of(policy.master_key_ids[table.footer_key])] if kms.instances else []
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
        _COLUMNS: ",".join(quote_plus(".".join(path)) for path in written),
        # Tables share KEKs where these may be the same; our factory adds the configuration of the session.
        _CACHE_NAME: cache_name(
            "writing", table.effective_kek_length_bits, table.cache_lifetime_seconds, *instances
        ),
    }
    if instances:
        options[KMS_INSTANCE] = instances[0]
    if policy.key_values:
        options[_KEY_VALUES] = urlencode(policy.key_values)
    if table.double_wrapping:
        options["parquet.encryption.kek.length.bits"] = str(table.effective_kek_length_bits)
    if any(path[-1:] == ("metadata",) for path in written):
        # Shredded, a variant would have other columns in each file. Spark 4.3 shreds by default.
        options[_SHREDDING] = "false"
    return options


def spark_leaf_paths(schema: StructType) -> list[ColumnPath]:
    """Return the paths of all leaf columns that Spark writes for a schema, in its order.

    With `spark.sql.parquet.writeLegacyFormat` or shredded variants, Spark writes others: such a write is refused.
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


# --- writes that a JVM plans ---


class WriteRequests:
    """Compares writes with the tables of one configuration; `WriteCheck.java` is the other side.

    A request is a JSON object: `table`; `columns`, the paths of the leaf columns that are written; `expected`, the
    columns that the options of the write were made for; `options`, these options; `schema`, the text of Spark's
    schema in JSON; `key_values`, the values that the options give to placeholders. The driver adds `partitions`,
    the columns that the write is partitioned by, and `catalog_table`, the name of the table in a catalog. If the
    configuration has keys by template, `in_folders` has the folders above the file that can give values; on the
    driver, the folders above all files. May be used by any number of threads.
    """

    def __init__(self, keys: KeyService) -> None:
        self._keys = keys

    def check(self, content: bytes) -> tuple[list[str], dict[str, str]]:
        """Refuse a write whose options differ from the options of its table for the columns that are written.

        Columns may be new since the options were made, if the table names a key for them, lists them as plaintext,
        or puts unlisted columns under the footer's key.

        Returns:
            The identifiers of the master keys that the write needs, and the options that name the keys of its
            columns, empty where an option does not apply; for a file, the keys of its values.
        """
        request = json.loads(content)
        name, options = request["table"], request["options"]
        leaves = [tuple(path) for path in request["columns"]]
        field_labels = partial(labels_of_spark, json.loads(request["schema"]))
        found = {".".join(path) for path in leaves}
        expected = {unquote_plus(column) for column in request["expected"].split(",")}
        partitions = request.get("partitions", [])
        key_values = dict(parse_qsl(request.get("key_values", "")))
        new, missing = sorted(found - expected), sorted(expected - found)
        mismatch = (
            f"The columns are not those that the options of table {name} were made for"
            + (f": new are [{', '.join(new)}]" if new else "")
            + (f": missing are [{', '.join(missing)}]" if missing else "")
            + "."
        )
        try:
            all_leaves = [*leaves, *((column,) for column in partitions)]
            wanted = table_options(self._keys, name, all_leaves, partitions, field_labels, key_values)
        except ConfigurationError as error:
            if new or missing:
                raise ConfigurationError(mismatch, hint=f"First, {error}") from error
            raise
        policy = self._keys.policy(name, leaves, field_labels, key_values)
        compared = [option for option in wanted if option.startswith("parquet.encryption.")]
        differing = [option for option in compared if options.get(option, "") != wanted[option]]
        differing = [option for option in differing if option not in _NOT_COMPARED]
        changed = [option for option in _KEY_OPTIONS if options.get(option, "") != wanted.get(option, "")]
        if _keys_of(options, found & expected) != _keys_of(wanted, found & expected):
            differing += changed
        # Where unlisted columns are plaintext, a readable column takes a decision: new options.
        undecided = policy.table.treats_unlisted == "plaintext" and any(
            policy.columns[tuple(path)].kind == "plaintext" for path in request["columns"] if ".".join(path) in new
        )
        if missing or undecided:
            names = [*differing, *changed, _COLUMNS, *wanted.keys() & {_SHREDDING}]
            raise ConfigurationError(mismatch, hint=_new_options(request, names, wanted))
        if differing:
            raise ConfigurationError(
                "The options of this write were made by another configuration than the one that the session has: "
                f"for table {name} they differ in {', '.join(sorted(set(differing)))}.",
                hint=_new_options(request, [*differing, _COLUMNS], wanted),
            )
        partitioned = {column.lower() for column in partitions}
        # Only tasks know the values of partitions.
        if "in_folders" in request and not any(name.lower() in partitioned for name in policy.table.key_values):
            policy = self._keys.with_values(policy, request["in_folders"] or "the write")
            assert self._keys.kms is not None
            wanted |= _key_options(policy, self._keys.kms)
        return policy.used_master_key_ids(), {option: wanted.get(option, "") for option in _KEY_OPTIONS}


def _keys_of(options: dict[str, str], columns: Iterable[str]) -> dict[str | None, str | None]:
    """Return the key that options name for the footer (None) and for each of the columns."""
    uniform, footer, column_keys, complete = (options.get(option, "").strip() for option in _KEY_OPTIONS)
    lists = [entry.partition(":") for entry in column_keys.split(";")]
    listed = {column.strip(): key.strip() for key, _, columns in lists for column in columns.split(",")}
    unlisted = uniform or (footer if complete == "true" else None)
    return {None: uniform or footer} | {column: listed.get(column, unlisted) for column in columns}


def _new_options(request: dict[str, Any], names: Iterable[str], wanted: dict[str, str]) -> str:
    """Return how to give a write the right options."""
    table = request.get("catalog_table")
    if table is None:
        return (
            "Give the write .options(**keytools.spark_options(table, df.schema)) of the frame that is written, "
            "with partition_by where it is partitioned."
        )
    # A catalog keeps what is not named; no option can be taken away.
    properties = {name: wanted.get(name, "") for name in sorted(set(names))}
    listed = ", ".join(f"{sql_text(name)} = {sql_text(value)}" for name, value in properties.items())
    return f"Give the table its new options: ALTER TABLE {table} SET SERDEPROPERTIES ({listed})"


def sql_text(text: str) -> str:
    """Return a literal of Spark SQL."""
    return "'" + text.replace("\\", r"\\").replace("'", r"\'") + "'"


# --- files that a JVM saw ---


class TableRequests:
    """Compares files with the tables of one configuration; `CheckedFile.java` is the other side.

    A request is a JSON object: `table`, empty where the reader named none; `file`, for messages; `algorithm`;
    `footer_key`, the footer's master key as the file names it; and `columns`, once the footer is authentic: each a
    path, a kind of encryption, and a master key or null; and with these `folders`, the names of columns that
    folders above the file give values to. Where the configuration has keys by template, `in_folders` are the
    folders above the file that can give values, and `keys` the master keys of all columns. Where keys depend on
    values of columns, `footer` is the authentic footer, in base64. Before the footer is opened, `aad` has the name
    of the file, the AAD prefix that the read gives, and what the file says of its AAD. May be used by any number
    of threads.
    """

    def __init__(self, configuration: Configuration, kms: KmsClient | None = None) -> None:
        self._configuration = configuration
        self._kms = kms
        self._checks: dict[str, TableCheck] = {}

    def check(self, content: bytes) -> bytes:
        """Refuse a file that is not what its table says; return the AAD prefixes that it may have, if asked."""
        request = json.loads(content)
        columns = [self._column(*column) for column in request.get("columns", [])]
        folders = {name: f"{name}=..." for name in request.get("folders", [])}
        encrypted = [column.path for column in columns if column.encryption is not ColumnEncryption.PLAINTEXT]
        if not self._configuration.tables:
            refuse_values_of_folders(request["file"], folders, encrypted, None)
            return self._aad_prefixes(request, None)
        check = self._check_of(request["table"], request["file"])
        algorithm = Algorithm(request["algorithm"])
        footer_key = self._key(request["footer_key"])
        keys = [footer_key, *(column.key for column in columns), *map(self._key, request.get("keys", []))]
        check = check.for_file(request.get("in_folders", ""), keys)
        mismatches = check.footer_mismatches(algorithm, footer_key)
        check.refuse(request["file"], [*mismatches, *check.column_mismatches(footer_key, columns)])
        keyed = [(name,) for name in check.keyed(folders)]
        refuse_values_of_folders(request["file"], folders, [*encrypted, *keyed], check)
        if "footer" in request:
            values = values_in_footer(b64decode(request["footer"]), check.settings.value_columns)
            check.refuse(request["file"], check.value_mismatches(values))
        return self._aad_prefixes(request, check)

    def _aad_prefixes(self, request: dict[str, Any], check: TableCheck | None) -> bytes:
        if "aad" not in request:
            return b""
        name, given, stored, file_unique, supply = (
            request["aad"][part] for part in ("file_name", "given", "stored", "file_unique", "supply")
        )
        of_table = None
        if check is not None:
            of_table = check.settings.rendered_aad_prefix(table_name=check.table_name, file_name=name)
        expected = None
        # An empty option accepts what the file stores.
        if given != "":
            expected = expected_aad_prefix(
                None if given is None else filled_prefix(given, lambda text: text.replace("{file_name}", name)),
                [] if of_table is None else [of_table],
                any_file_unique=self._configuration.reading.file_unique_lengths == "any",
            )
        prefixes = aad_prefixes(
            expected,
            None if stored is None else b64decode(stored),
            None if file_unique is None else b64decode(file_unique),
            request["file"],
            supply_aad_prefix=supply,
        )
        written = [b64encode(prefix).decode() for prefix in prefixes]
        return json.dumps({"prefixes": written, "is_expected": expected is not None}).encode()

    def _check_of(self, table_name: str, file: str) -> TableCheck:
        if not table_name and len(self._configuration.tables) > 1:
            raise ConfigurationError(
                f"{file} is read without a table, and the configuration has {len(self._configuration.tables)}.",
                hint='Give the read the options of its table: .options(**keytools.spark_read_options("TABLE")).',
            )
        check = self._checks.get(table_name)
        if check is None:
            name, _ = self._configuration.select_table(table_name or None)
            check = TableCheck(self._configuration, name, ignores_case=True)
            self._checks[table_name] = check
        return check

    def _key(self, named: str) -> KeyReference:
        return MasterKeyReference(id_of_jvm(self._kms, named))

    def _column(self, path: list[str], kind: str, named: str | None) -> SeenColumn:
        if kind not in ColumnEncryption.__members__:
            raise ValueError("there is no such kind of encryption")
        return SeenColumn(tuple(path), ColumnEncryption[kind], None if named is None else self._key(named))


def id_of_jvm(kms: KmsClient | None, named: str) -> str:
    """Return the identifier of a master key that a JVM names: the KMS of the file, a line end, and its text."""
    instance_id, mark, written = named.partition("\n")
    master_key_id = decode_master_key_id(written if mark else named)
    return master_key_id if kms is None else kms.id_of_file(master_key_id, instance_id if mark else None)
