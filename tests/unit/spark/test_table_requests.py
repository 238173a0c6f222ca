"""A file that a JVM has read, or plans to write, compared with its table."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import types as t

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.errors import (
    AadPrefixError,
    ConfigurationError,
    DecryptionError,
    ParquetFormatError,
    TableMismatchError,
    UnsupportedBySparkError,
)
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.spark.table_options import TableRequests, WriteRequests

KMS = {"type": "in_memory", "keys": ["footer", "pii", "other"]}
TABLES = {
    "t": {
        "footer_key": "footer",
        "column_keys": {"pii": ["a"]},
        "unlisted_columns": "plaintext",
        "aad_prefix": "{table_name}/{file_name}",
    },
    "u": {"footer_key": "other", "column_keys": {"pii": ["a"]}, "unlisted_columns": "plaintext"},
}
AS_T = [[["a"], "COLUMN_KEY", "pii"], [["b", "c"], "PLAINTEXT", None]]


def answer(tables: dict[str, Any] = TABLES, **request: Any) -> bytes:
    configuration = parse_configuration({"version": 1, "kms": KMS, "tables": tables})
    whole = {"table": "t", "file": "s3a://lake/f.parquet", "algorithm": "AES_GCM_V1", "footer_key": "footer"}
    return TableRequests(configuration).check(json.dumps(whole | request).encode())


def test_a_file_as_its_table_says() -> None:
    assert answer() == answer(columns=AS_T) == b""
    assert answer(table="u", footer_key="other", columns=AS_T) == b""
    # Key identifiers stand in files as parquet-java takes them.
    assert answer(columns=[[["a"], "COLUMN_KEY", "%70ii"]]) == b""


UNIQUE = bytes(range(8))


def prefixes(
    given: str | None = None,
    stored: bytes | None = None,
    unique: bytes | None = UNIQUE,
    supply: bool = False,
    name: str = "f.parquet",
    **more: Any,
) -> tuple[list[bytes], bool]:
    def text(data: bytes | None) -> str | None:
        return None if data is None else base64.b64encode(data).decode()

    aad = {"file_name": name, "given": given, "stored": text(stored), "file_unique": text(unique)}
    found = json.loads(answer(aad=aad | {"supply": supply}, **more))
    return [base64.b64decode(prefix) for prefix in found["prefixes"]], found["is_expected"]


def test_the_aad_prefixes_that_a_file_may_have() -> None:
    own, bare = b"t/f.parquet\0", b"t/f.parquet"
    u = {"table": "u", "footer_key": "other"}
    assert prefixes(stored=own) == ([own], True)
    assert prefixes(stored=bare) == ([bare], True)
    assert prefixes(supply=True) == ([own, bare], True)
    assert prefixes("x/{file_name}", b"x/f.parquet") == ([b"x/f.parquet"], True)
    assert prefixes("base64:eAA=", supply=True) == ([b"x\0"], True)
    # The name of a file does not choose the form of the prefix.
    assert prefixes("{file_name}", supply=True, name="base64:eA==")[0] == [b"base64:eA==\0", b"base64:eA=="]
    # An empty option accepts what is stored, as a table without a prefix does.
    assert prefixes("", b"x") == prefixes(stored=b"x", **u) == ([b"x"], False)
    assert prefixes("") == prefixes(stored=b"", **u) == ([b""], False)
    assert prefixes(stored=b"x", tables={}) == ([b"x"], False)
    assert prefixes("x", b"x", tables={}) == ([b"x"], True)


@pytest.mark.parametrize(
    ("given", "stored", "unique", "supply", "text"),
    [
        (None, None, UNIQUE, False, "written without one"),
        (None, b"x", UNIQUE, False, "stores another AAD prefix"),
        ("x", b"t/f.parquet\0", UNIQUE, False, "stores another AAD prefix"),
        (None, b"t/f.parquet", UNIQUE[1:], False, "the file unique has 7 bytes, not 8"),
        ("", None, UNIQUE, True, "an AAD prefix that is not stored"),
        ("", None, UNIQUE + b"\2\0\0\0\0\0", False, "a data page is in the place of the footer"),
        ("", UNIQUE, b"\2\0\0\0\0\0", False, "a data page is in the place of the footer"),
        ("a\0", None, UNIQUE, True, "contains NUL"),
        ("base64:%", None, UNIQUE, True, "not base64"),
        (None, b"t/f.parquet", None, False, "no aad_file_unique"),
    ],
)
def test_an_aad_that_is_refused(
    given: str | None, stored: bytes | None, unique: bytes | None, supply: bool, text: str
) -> None:
    with pytest.raises((AadPrefixError, DecryptionError, ParquetFormatError), match=text):
        prefixes(given, stored, unique, supply)


@pytest.mark.parametrize(
    ("request_", "texts"),
    [
        ({"footer_key": "other"}, ["footer", "'other'", "'footer'"]),
        ({"algorithm": "AES_GCM_CTR_V1"}, ["AES_GCM_CTR_V1", "AES_GCM_V1"]),
        ({"columns": [[["a"], "COLUMN_KEY", "other"]]}, ["'other'", "'pii'"]),
        ({"columns": [[["a"], "FOOTER_KEY", None]]}, ["'footer'", "'pii'"]),
        ({"columns": [[["a"], "PLAINTEXT", None]]}, ["plaintext", "'pii'"]),
        # Spark does not distinguish these names.
        ({"columns": [*AS_T, [["A"], "PLAINTEXT", None]]}, ["plaintext", "'pii'"]),
        ({"columns": [*AS_T, [["d"], "COLUMN_KEY", "other"]]}, ["'other'"]),
    ],
)
def test_a_file_that_is_another(request_: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(TableMismatchError, match=r"s3a://lake/f\.parquet") as caught:
        answer(**request_)
    assert [text for text in ["'t'", *texts] if text not in str(caught.value)] == []


@pytest.mark.parametrize("tables", [TABLES, {}], ids=["tables", "none"])
@pytest.mark.parametrize("name", ["a", "A", "b"])
def test_a_folder_gives_no_values_to_an_encrypted_column(name: str, tables: dict[str, Any]) -> None:
    columns = [[["a"], "COLUMN_KEY", "pii"], [["b", "c"], "FOOTER_KEY", None]]
    with pytest.raises(DecryptionError, match=rf"(?i)f\.parquet: the name of a folder gives values to '{name}'"):
        answer(tables, columns=columns, folders=["year", name])


def test_nor_to_one_that_the_table_has_under_a_key() -> None:
    plain = [[["b", "c"], "PLAINTEXT", None]]
    assert answer(columns=plain, folders=["year", "b"]) == b""
    with pytest.raises(DecryptionError, match="the name of a folder gives values to 'A'"):
        answer(columns=plain, folders=["A"])


def test_a_read_names_its_table() -> None:
    with pytest.raises(ConfigurationError, match=r"f.parquet is read without a table.* has 2.*spark_read_options"):
        answer(table="")
    with pytest.raises(ConfigurationError, match="there is no table 'v'"):
        answer(table="v")
    only = {"u": TABLES["u"]}
    assert answer(only, table="", footer_key="other") == b""
    with pytest.raises(TableMismatchError):
        answer(only, table="")


def test_without_tables_there_is_nothing_to_compare_with() -> None:
    assert answer({}, table="", footer_key="whatever") == b""


@pytest.mark.parametrize("columns", [[[["a"], "SECRET", None]], [["a"]], 7])
def test_what_is_no_request(columns: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        answer(columns=columns)


# --- writes ---

WRITTEN: dict[str, Any] = {"footer_key": "footer", "column_keys": {"pii": ["a"]}, "unlisted_columns": "footer_key"}


def stored_options(table: dict[str, Any] = WRITTEN, names: str = "abm", by: tuple[str, ...] = ("m",)) -> Any:
    """Return options as they were made for a frame."""
    schema = t.StructType([t.StructField(name, t.StringType()) for name in names])
    tools = Keytools.from_mapping({"version": 1, "kms": KMS, "tables": {"t": table}})
    return tools.spark_options("t", schema, partition_by=by)


def check_write(
    options: dict[str, str], columns: str = "ab", tables: dict[str, Any] | None = None, **more: Any
) -> list[str]:
    document = {"version": 1, "kms": KMS, "tables": {"t": WRITTEN} if tables is None else tables}
    request = {
        "table": "t",
        "expected": options["parquet.keytools.columns"],
        "columns": [[name] for name in columns],
        "schema": "{}",
        "options": {name: value for name, value in options.items() if name.startswith("parquet.encryption.")},
        **more,
    }
    keys = KeyService(parse_configuration(document), None, time.monotonic)
    return WriteRequests(keys).check(json.dumps(request).encode())[0]


def test_a_write_as_its_table_says_needs_these_master_keys() -> None:
    assert check_write(stored_options()) == check_write(stored_options(), partitions=["m"]) == ["footer", "pii"]
    # Keys without columns are not needed.
    table = {"footer_key": "footer", "unlisted_columns": "footer_key"}
    assert check_write(stored_options(table), tables={"t": table}) == ["footer"]


def test_only_its_own_table_concerns_a_write() -> None:
    tables = {
        "t": WRITTEN | {"also_trusted": ["other"]},
        "unrelated": {"footer_key": "other", "unlisted_columns": "plaintext"},
    }
    assert check_write(stored_options(), tables=tables) == ["footer", "pii"]
    # A frame may have its columns in another order.
    table = WRITTEN | {"column_keys": {"pii": ["a", "b"]}}
    assert check_write(stored_options(table, "bam"), "ab", {"t": table}) == ["footer", "pii"]


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"footer_key": "other"}, "footer.key"),
        ({"column_keys": {"other": ["a"]}}, "column.keys"),
        ({"column_keys": {"pii": ["a", "b"]}}, "column.keys"),
        ({"column_keys": {}}, "uniform.key"),
        ({"unlisted_columns": "plaintext"}, "complete.columns"),
        ({"data_key_length_bits": 256}, "data.key.length.bits"),
        ({"double_wrapping": False}, "double.wrapping"),
        ({"algorithm": "AES_GCM_CTR_V1"}, "algorithm"),
    ],
)
@pytest.mark.filterwarnings("ignore::parquet_keytools.config.settings.ConfigurationWarning")
def test_a_table_that_changed_since_its_options_were_made(change: dict[str, Any], option: str) -> None:
    tables = {"t": WRITTEN | change}
    with pytest.raises(ConfigurationError, match=rf"made by another configuration.*parquet\.encryption\.{option}"):
        check_write(stored_options(), tables=tables)
    with pytest.raises(ConfigurationError, match=r"ALTER TABLE `d`\.`x` SET SERDEPROPERTIES") as caught:
        check_write(stored_options(), tables=tables, catalog_table="`d`.`x`")
    assert f"'parquet.encryption.{option}' = '" in str(caught.value)


def test_other_columns_than_the_options_were_made_for() -> None:
    with pytest.raises(ConfigurationError, match=r"new are \[c\]: missing are \[b\].*spark_options.*partition_by"):
        check_write(stored_options(), "ac")
    readable = WRITTEN | {"unlisted_columns": "plaintext"}
    statement = r"new are \[c\].*ALTER TABLE `x` SET SERDEPROPERTIES \('parquet.keytools.columns' = 'a,b,c'\)$"
    with pytest.raises(ConfigurationError, match=statement):
        check_write(stored_options(readable), "abc", {"t": readable}, catalog_table="`x`")


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ({}, {"footer.key": "footer", "column.keys": "pii:a", "complete.columns": "true"}),
        ({"column_keys": {"pii": ["a", "c*"]}}, {"column.keys": "pii:a,c", "complete.columns": "true"}),
        ({"unlisted_columns": "error", "plaintext_columns": ["b", "c"]}, {"complete.columns": "false"}),
    ],
)
def test_a_new_column_gets_the_key_that_its_table_says(change: dict[str, Any], keys: dict[str, str]) -> None:
    """The options of the write are older; a table with one key has them in another form."""
    old = WRITTEN | change | {"column_keys": {"pii": ["a"]}}
    if "plaintext_columns" in change:
        old |= {"plaintext_columns": ["b"]}
    options = stored_options(old, "ab", ())
    tables = parse_configuration({"version": 1, "kms": KMS, "tables": {"t": WRITTEN | change}})
    request = {
        "table": "t",
        "expected": options["parquet.keytools.columns"],
        "columns": [["a"], ["b"], ["c"]],
        "schema": "{}",
        "options": {name: value for name, value in options.items() if name.startswith("parquet.encryption.")},
    }
    found = WriteRequests(KeyService(tables, None, time.monotonic)).check(json.dumps(request).encode())
    assert found[0] == ["footer", "pii"]
    assert {name: found[1][f"parquet.encryption.{name}"] for name in keys} == keys
    assert found[1]["parquet.encryption.uniform.key"] == ""


def test_the_first_key_of_a_table_that_had_only_one() -> None:
    uniform = {"footer_key": "footer", "unlisted_columns": "footer_key"}
    tables = {"t": uniform | {"column_keys": {"pii": ["c"]}}}
    assert check_write(stored_options(uniform), "abc", tables) == ["footer", "pii"]


def test_a_new_column_that_no_policy_covers() -> None:
    """The statement comes after the configuration."""
    tables = {"t": WRITTEN | {"unlisted_columns": "error", "plaintext_columns": ["b"]}}
    with pytest.raises(ConfigurationError, match=r"new are \[c\]\. First, .*'c'") as caught:
        check_write(stored_options(), "abc", tables, catalog_table="`x`")
    assert "ALTER TABLE" not in str(caught.value)


def test_a_partition_column_that_got_a_key() -> None:
    tables = {"t": WRITTEN | {"column_keys": {"pii": ["a", "m"]}}}
    with pytest.raises(ConfigurationError, match="'m' would be in the names of folders"):
        check_write(stored_options(), tables=tables, partitions=["m"])


def test_a_table_that_spark_cannot_write_any_more() -> None:
    with pytest.raises(UnsupportedBySparkError, match="AAD prefix"):
        check_write(stored_options(), tables={"t": WRITTEN | {"aad_prefix": "x/{file_name}"}})


def test_statements_quote_what_names_contain() -> None:
    table = WRITTEN | {"column_keys": {"pii": ["a", "it's \\"]}}
    keys = KeyService(
        parse_configuration({"version": 1, "kms": KMS, "tables": {"t": table}}), None, time.monotonic
    )
    request = {"table": "t", "expected": "a", "columns": [["a"], ["it's \\"]], "schema": "{}", "options": {}}
    with pytest.raises(ConfigurationError) as caught:
        WriteRequests(keys).check(json.dumps(request | {"catalog_table": "`x`"}).encode())
    assert r"'pii:a,it\'s \\'" in str(caught.value)


# --- keys by template ---

TEMPLATES: dict[str, Any] = {
    "footer_key": "footer",
    "column_keys": {"of-{m}": ["a"]},
    "unlisted_columns": "footer_key",
    "key_values": {"m": {"from": "partition", "pattern": "[a-z]{1,3}"}},
}


@pytest.mark.parametrize(
    ("folders", "is_own"),
    [("m=x/", True), ("day=1/M=%78/", True), ("m=y/", False), ("", False), ("m=x/m=y/", False), ("m=X/", False)],
)
def test_a_file_is_under_the_key_of_its_folder(folders: str, is_own: bool) -> None:
    columns = [[["a"], "COLUMN_KEY", "of-x"], [["b"], "FOOTER_KEY", None]]
    request = {"columns": columns, "in_folders": folders, "file": f"/lake/{folders}f.parquet"}
    if is_own:
        assert answer({"t": TEMPLATES}, **request) == b""
    else:
        with pytest.raises(TableMismatchError, match="of-"):
            answer({"t": TEMPLATES}, **request)


def footer_in(file: bytes) -> str:
    """Return the footer of a file in base64; a plaintext footer is followed by its signature."""
    length = int.from_bytes(file[-8:-4], "little")
    return base64.b64encode(file[-8 - length : -8]).decode()


def test_a_file_is_under_the_key_of_its_column(tmp_path: Path) -> None:
    table = TEMPLATES | {"key_values": {"m": {"from": "column", "pattern": "[a-z]{1,3}"}}}
    request = {"in_folders": "", "keys": ["of-x"]}

    def footer_of(**columns: Any) -> str:
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table(columns), sink)
        return footer_in(sink.getvalue().to_pybytes())

    assert answer({"t": table}, footer=footer_of(a=["c", "d"], m=["x", "x"]), **request) == b""
    assert answer({"t": table}, footer=footer_of(m=pa.array([], pa.string())), **request) == b""
    for columns, text in (
        ({"m": ["y", "y"]}, "another value"),
        ({"m": ["x", "y"]}, "several values"),
        ({"m": ["x", None]}, "nulls"),
        ({"a": ["x", "x"]}, "no column 'm'"),
    ):
        with pytest.raises(TableMismatchError, match=text):
            answer({"t": table}, footer=footer_of(**columns), **request)
    own_key = {**WRITTEN, "column_keys": {"pii": ["m"]}, "unlisted_columns": "plaintext", "plaintext_footer": True}
    with Keytools.from_mapping({"version": 1, "kms": KMS, "tables": {"t": own_key}}) as tools:
        tools.write_table(pa.table({"a": ["c"], "m": ["x"]}), tmp_path / "own.parquet")
    with pytest.raises(TableMismatchError, match="'m' has a key of its own"):
        answer({"t": table}, footer=footer_in((tmp_path / "own.parquet").read_bytes()), **request)
    schema = t.StructType([t.StructField(name, t.StringType()) for name in "am"])
    with pytest.raises(UnsupportedBySparkError, match="before it knows the values of its columns"):
        Keytools.from_mapping({"version": 1, "kms": KMS, "tables": {"t": table}}).spark_options("t", schema)


def test_all_parts_of_a_wide_file_are_under_the_keys_of_one_value() -> None:
    table = TEMPLATES | {"key_values": {"m": {"from": "argument", "pattern": "[a-z]{1,3}"}}}
    part = {"in_folders": "", "columns": [[["a"], "COLUMN_KEY", "of-x"]]}
    assert answer({"t": table}, keys=["of-x"], **part) == b""
    with pytest.raises(TableMismatchError):
        answer({"t": table}, keys=["of-x", "of-y"], **part)


def test_a_write_has_the_keys_of_its_values() -> None:
    tables = {"t": TEMPLATES}

    def keys_of(options: dict[str, str], **request: Any) -> list[str]:
        return check_write(options, tables=tables, **request)

    options = stored_options(TEMPLATES)
    assert keys_of(options, in_folders="m=x/") == ["footer", "of-x"]
    # On the driver, the values are unknown: only tasks know them. A stream has no folder yet.
    assert keys_of(options, in_folders="", partitions=["m"]) == keys_of(options) == ["footer"]
    for folders, text in {"": "the write has no value of m", "m=X/": "refuses the value 'X'"}.items():
        with pytest.raises(ConfigurationError, match=text):
            keys_of(options, in_folders=folders)

    tables = {"t": TEMPLATES | {"key_values": {"m": {"from": "argument", "pattern": "[a-z]{1,3}"}}}}
    assert keys_of(stored_options(tables["t"]), in_folders="", key_values="m=y") == ["footer", "of-y"]
    with pytest.raises(ConfigurationError, match="differ: 'x', 'y'"):
        keys_of(stored_options(tables["t"]), in_folders="m=x/", key_values="m=y")
    with pytest.raises(ConfigurationError, match="no key of the table 't' has the placeholder 'n'"):
        Keytools.from_mapping({"version": 1, "kms": KMS, "tables": tables}).spark_options(
            "t", t.StructType([t.StructField("a", t.StringType())]), key_values={"n": "x"}
        )
