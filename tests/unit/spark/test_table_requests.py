"""What a JVM saw of a file, compared with its table: the check itself is tested with `files`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from parquet_keytools import parse_configuration
from parquet_keytools.errors import ConfigurationError, DecryptionError, TableMismatchError
from parquet_keytools.spark.table_options import TableRequests

KMS = {"type": "in_memory", "keys": ["footer", "pii", "other"]}
TABLES = {
    "t": {"footer_key": "footer", "column_keys": {"pii": ["a"]}, "aad_prefix": "{table_name}/{file_name}"},
    "u": {"footer_key": "other", "column_keys": {"pii": ["a"]}},
}
AS_T = [[["a"], "COLUMN_KEY", "pii"], [["b", "c"], "PLAINTEXT", None]]


def answer(tables: dict[str, Any] = TABLES, **request: Any) -> bytes:
    configuration = parse_configuration({"version": 1, "kms": KMS, "tables": tables})
    whole = {"table": "t", "file": "s3a://lake/f.parquet", "algorithm": "AES_GCM_V1", "footer_key": "footer"}
    return TableRequests(configuration).check(json.dumps(whole | request).encode())


def test_a_file_as_its_table_says() -> None:
    assert answer() == answer(columns=AS_T) == b"t/{file_name}"
    assert answer(table="u", footer_key="other", columns=AS_T) == b""
    # Key identifiers stand in files as parquet-java takes them.
    assert answer(columns=[[["a"], "COLUMN_KEY", "%70ii"]]) == b"t/{file_name}"


@pytest.mark.parametrize(
    ("request_", "texts"),
    [
        ({"footer_key": "other"}, ["footer", "'other'", "'footer'"]),
        ({"algorithm": "AES_GCM_CTR_V1"}, ["AES_GCM_CTR_V1", "AES_GCM_V1"]),
        ({"columns": [[["a"], "COLUMN_KEY", "other"]]}, ["'other'", "'pii'"]),
        ({"columns": [[["a"], "FOOTER_KEY", None]]}, ["'footer'", "'pii'"]),
        ({"columns": [[["a"], "PLAINTEXT", None]]}, ["plaintext", "'pii'"]),
        # Spark makes no difference between these names.
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
    with pytest.raises(
        DecryptionError, match=rf"f\.parquet: the name of a folder gives values to '{name.lower()}'"
    ):
        answer(tables, columns=columns, folders=["year", name])


def test_nor_to_one_that_the_table_has_under_a_key() -> None:
    plain = [[["b", "c"], "PLAINTEXT", None]]
    assert answer(columns=plain, folders=["year", "b"]) == b"t/{file_name}"
    with pytest.raises(DecryptionError, match="the name of a folder gives values to 'a'"):
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
