"""Every setting of a table becomes an option of parquet-java, or an error; none is omitted."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import types as t

from parquet_keytools import Keytools
from parquet_keytools.config.settings import TableSettings
from parquet_keytools.errors import ConfigurationError, UnsupportedBySparkError
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.spark.table_options import spark_leaf_paths

SCHEMA = t.StructType(
    [
        t.StructField("id", t.LongType()),
        t.StructField("name", t.StringType()),
        t.StructField("month", t.IntegerType()),
        t.StructField("tags", t.ArrayType(t.StructType([t.StructField("key", t.StringType())]))),
        t.StructField("scores", t.MapType(t.StringType(), t.ArrayType(t.DoubleType()))),
    ]
)
ARN = "arn:aws:kms:eu-west-1:111122223333:key/1234 5;6,$${x}"

pytestmark = pytest.mark.filterwarnings("ignore::parquet_keytools.config.settings.ConfigurationWarning")


def keytools(table: dict[str, Any], **more: Any) -> Keytools:
    kms = {"type": "in_memory", "keys": ["footer", "pii", ARN]}
    hash_keys = (
        {"digests": {"master_key": "footer", "wrapped_key": "of no use here"}} if "hash_key" in table else {}
    )
    tables = {"t": {"footer_key": "footer", "unlisted_columns": "plaintext"} | table}
    document = {"version": 1, "kms": kms, "hash_keys": hash_keys, "tables": tables} | more
    return Keytools.from_mapping(document)


def options(table: dict[str, Any], schema: t.StructType = SCHEMA, **arguments: Any) -> dict[str, str]:
    return keytools(table).spark_options("t", schema, **arguments)


def short(all_options: dict[str, str]) -> dict[str, str]:
    return {name.removeprefix("parquet.encryption."): value for name, value in all_options.items()}


def test_leaf_columns_have_parquets_names() -> None:
    schema = t.StructType(
        [*SCHEMA.fields, t.StructField("v", t.VariantType()), t.StructField("gone", t.StructType([]))]
    )
    assert [".".join(path) for path in spark_leaf_paths(schema)] == [
        "id",
        "name",
        "month",
        "tags.list.element.key",
        "scores.key_value.key",
        "scores.key_value.value.list.element",
        "v.value",
        "v.metadata",
    ]


def test_the_defaults() -> None:
    found = short(options({"column_keys": {"pii": ["name", "tags", "scores.*"]}}))
    assert len(found.pop("key.access.token")) == 32
    assert found == {
        "parquet.crypto.factory.class": "parquet_keytools.KeytoolsCryptoFactory",
        "kms.client.class": "parquet_keytools.PythonKmsClient",
        "footer.key": "footer",
        "column.keys": "pii:name,tags.list.element.key,scores.key_value.key,scores.key_value.value.list.element",
        "complete.columns": "false",
        "plaintext.footer": "false",
        "algorithm": "AES_GCM_V1",
        "data.key.length.bits": "128",
        "kek.length.bits": "128",
        "double.wrapping": "true",
        "key.material.store.internally": "true",
        "cache.lifetime.seconds": "600",
        "parquet.keytools.table": "t",
        "parquet.keytools.columns": (
            "id,name,month,tags.list.element.key,scores.key_value.key,scores.key_value.value.list.element"
        ),
    }


CHANGES: dict[str, tuple[Any, dict[str, str] | str]] = {
    "footer_key": ("pii", {"footer.key": "pii"}),
    "column_keys": ({"footer": ["id"]}, {"column.keys": "footer:id"}),
    # Existing files may be under it; Spark writes no file under it.
    "also_trusted": (["pii"], {}),
    "unlisted_columns": ("footer_key", {"complete.columns": "true"}),
    "plaintext_columns": (["*"], {"complete.columns": "false"}),
    "plaintext_footer": (True, "its plaintext footers show size statistics of encrypted columns"),
    "plaintext_footer_key_values": ("refuse", "its plaintext footers show size statistics of encrypted columns"),
    "plaintext_footer_keys": (["owner"], "its plaintext footers show size statistics of encrypted columns"),
    "algorithm": ("AES_GCM_CTR_V1", {"algorithm": "AES_GCM_CTR_V1"}),
    "data_key_length_bits": (192, {"data.key.length.bits": "192", "kek.length.bits": "192"}),
    "kek_length_bits": (256, {"kek.length.bits": "256"}),
    "double_wrapping": (False, {"double.wrapping": "false"}),
    "key_material": ("external", "left behind when a committer moves"),
    "aad_prefix": ("flights/{file_name}", "an AAD prefix together with keys from a KMS"),
    "store_aad_prefix": (False, "an AAD prefix together with keys from a KMS"),
    # Readers see digests; written data stays the same.
    "hash_key": ("digests", {}),
    "shown_columns": (["name"], {}),
    "cache_lifetime_seconds": (5, {"cache.lifetime.seconds": "5"}),
}


def test_every_setting_is_there() -> None:
    # Labels only give columns keys: tests/services/test_spark_labels.py.
    # Values only choose keys: tests/services/test_spark_tenants.py.
    settings = TableSettings.model_fields.keys() - {"labels_from", "unlabelled", "key_values"}
    assert CHANGES.keys() == settings, "map it in table_options, or refuse it"


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_becomes_an_option_or_an_error(name: str) -> None:
    value, expected = CHANGES[name]
    table = {"column_keys": {"pii": ["name"]}, name: value}
    if name.startswith("plaintext_footer_"):
        table["plaintext_footer"] = True
    if name == "plaintext_columns":
        table |= {"unlisted_columns": "error", "plaintext_columns": ["id", "month", "tags", "scores"]}
    if name == "shown_columns":
        table["hash_key"] = "digests"
    if name == "store_aad_prefix":
        table["aad_prefix"] = "flights"
    if isinstance(expected, str):
        with pytest.raises(UnsupportedBySparkError, match=expected) as caught:
            options(table)
        assert "`parquet-keytools spark encrypt` can" in str(caught.value)
    else:
        found = short(options(table))
        assert {option: found[option] for option in expected} == expected


def test_names_of_options_are_in_lower_case() -> None:
    """Spark passes some on in lower case, and parquet-java does not find others in lower case."""
    found = options({"column_keys": {"pii": ["name"]}, "unlisted_columns": "footer_key"})
    assert [name for name in found if name != name.lower()] == []


def test_all_columns_with_the_footer_key() -> None:
    found = short(options({"unlisted_columns": "footer_key"}))
    assert found["uniform.key"] == "footer"
    # parquet-java accepts neither of them together with a uniform key.
    assert not {"footer.key", "column.keys", "complete.columns"} & found.keys()


def test_the_footer_alone_is_refused() -> None:
    with pytest.raises(UnsupportedBySparkError, match="footer alone"):
        options({})


def test_data_keys_are_refused() -> None:
    table = {"t": {"footer_key": "kf", "column_keys": {"pii": ["name"]}, "unlisted_columns": "plaintext"}}
    tools = keytools({}, data_keys={"kf": "A" * 22 + "=="}, tables=table)
    with pytest.raises(UnsupportedBySparkError, match="data keys that the caller manages"):
        tools.spark_options("t", SCHEMA)


def test_without_a_kek_there_is_no_length_of_it() -> None:
    assert "kek.length.bits" not in short(options({"column_keys": {"pii": ["id"]}, "double_wrapping": False}))


def test_identifiers_are_encoded() -> None:
    tools = keytools({"column_keys": {"aws": ["id", "name"]}}, master_keys={"aws": ARN})
    encoded = "arn%3Aaws%3Akms%3Aeu-west-1%3A111122223333%3Akey/1234%205%3B6%2C%24{x}"
    assert short(tools.spark_options("t", SCHEMA))["column.keys"] == f"{encoded}:id,name"


@pytest.mark.parametrize("name", ["a.b", "a:b", "a;b", "a,b", " a", "a ", "${a}", "a\tb"])
def test_column_names_that_cannot_be_listed(name: str) -> None:
    schema = t.StructType([t.StructField(name, t.LongType()), t.StructField("id", t.LongType())])
    with pytest.raises(UnsupportedBySparkError, match="cannot hold the column name"):
        options({"column_keys": {"pii": [name.replace("${", "$${")]}}, schema)
    # A column without its own key is in no list of parquet-java's.
    found = options({"column_keys": {"pii": ["id"]}, "unlisted_columns": "footer_key"}, schema)
    assert found["parquet.encryption.column.keys"] == "pii:id"


def test_globs_and_names_must_match() -> None:
    with pytest.raises(ConfigurationError, match="'nmae' matches no column"):
        options({"column_keys": {"pii": ["nmae"]}})


def test_partition_columns_are_not_in_the_files() -> None:
    found = options({"column_keys": {"pii": ["name"]}}, partition_by=["month"])
    assert "month" not in found["parquet.keytools.columns"].split(",")


def test_a_partition_column_under_a_key_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'month' would be in the names of folders.*key 'pii'"):
        options({"column_keys": {"pii": ["month"]}}, partition_by=["month"])
    with pytest.warns(UserWarning, match="'month' would be in the names of folders"):
        options({"unlisted_columns": "footer_key"}, partition_by=["month"])
    with pytest.raises(ConfigurationError, match="no columns 'year'"):
        options({"unlisted_columns": "footer_key"}, partition_by=["year"])
    with pytest.raises(TypeError, match="partition_by"):
        options({"unlisted_columns": "footer_key"}, partition_by="month")


def test_variants_are_not_shredded() -> None:
    """Each file would have other columns, and a table could not list their keys."""
    schema = t.StructType([*SCHEMA.fields, t.StructField("v", t.ArrayType(t.VariantType()))])
    option = "spark.sql.variant.infershreddingschema"
    assert options({"column_keys": {"pii": ["name", "v"]}}, schema)[option] == "false"
    assert option not in options({"column_keys": {"pii": ["name"]}})


def test_caches_are_not_shared_where_keks_differ() -> None:
    def token(**table: Any) -> str:
        return options({"column_keys": {"pii": ["name"]}} | table)["parquet.encryption.key.access.token"]

    tokens = [token(), token(kek_length_bits=256), token(cache_lifetime_seconds=1)]
    assert len(set(tokens)) == 3
    assert token() == tokens[0]


def test_a_kms_that_was_passed_in_is_refused() -> None:
    configuration = keytools({"column_keys": {"pii": ["name"]}}).configuration
    with pytest.raises(ConfigurationError, match="passed in"):
        Keytools(configuration, kms=InMemoryKms({"footer": None, "pii": None})).spark_options("t", SCHEMA)


def test_the_options_of_a_read() -> None:
    tables = {
        "t": {"footer_key": "footer", "unlisted_columns": "plaintext"},
        "u": {"footer_key": "footer", "unlisted_columns": "plaintext", "aad_prefix": "{table_name}/{file_name}"},
    }
    tools = keytools({}, tables=tables)
    factory = {
        "parquet.crypto.factory.class": "parquet_keytools.KeytoolsCryptoFactory",
        "parquet.encryption.kms.client.class": "parquet_keytools.PythonKmsClient",
    }
    for name in tables:
        assert tools.spark_read_options(name) == factory | {"parquet.keytools.table": name}
    with pytest.raises(ConfigurationError, match="there are 2 tables"):
        tools.spark_read_options()
    with pytest.raises(ConfigurationError, match="there is no table 'v'"):
        tools.spark_read_options("v")
