"""Key-value metadata of files with refused columns: nothing about these columns' values, and the rest stays."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from view_case import ViewCase, parquet_bytes, whole

LEAK = "4711.25"
"""Stands for values of the refused column, wherever writers put some."""

BOX = [float(LEAK), 0.0, float(LEAK), 1.0]
GEO = {
    "version": "1.1.0",
    "primary_column": "secret",
    "columns": {
        "secret": {"encoding": "WKB", "bbox": BOX},
        "place": {
            "encoding": "WKB",
            "bbox": [1.5, 2.5, 3.5, 4.5],
            "covering": {"bbox": {"xmin": ["secret", "x"]}},
        },
    },
}
PANDAS = {
    "index_columns": ["secret", "id"],
    "column_indexes": [],
    "columns": [
        {"name": "id", "field_name": "id", "pandas_type": "int64", "numpy_type": "int64", "metadata": None},
        {
            "name": "secret",
            "field_name": "secret",
            "pandas_type": "categorical",
            "numpy_type": "int8",
            "metadata": {"num_categories": LEAK},
        },
    ],
    "attributes": {"mean of secret": LEAK},
    "creator": {"library": "pyarrow", "version": "26.0.1"},
    "pandas_version": "3.1.0",
}
SPARK = {
    "type": "struct",
    "fields": [{"name": "secret", "type": "double", "nullable": True, "metadata": {"max": LEAK}}],
}
AVRO = {"type": "record", "name": "r", "fields": [{"name": "secret", "type": "double", "default": LEAK}]}
KEY_VALUES = {
    "geo": json.dumps(GEO),
    "pandas": json.dumps(PANDAS),
    "org.apache.spark.sql.parquet.row.metadata": json.dumps(SPARK),
    "org.apache.spark.version": "4.1.0",
    "parquet.avro.schema": json.dumps(AVRO),
    "iceberg.schema": json.dumps({"fields": [{"id": 1, "name": "secret", "initial-default": LEAK}]}),
    "highest": LEAK,
}


def table() -> pa.Table:
    refused = pa.field("secret", pa.struct([pa.field("x", pa.float64(), metadata={"max": LEAK})]))
    schema = pa.schema(
        [
            pa.field("id", pa.int64(), metadata={"unit": "pieces"}),
            refused.with_metadata({"_PL_ENUM_VALUES": LEAK}),
            pa.field("place", pa.binary()),
        ],
        metadata=KEY_VALUES,
    )
    return pa.Table.from_pylist([{"id": 1, "secret": {"x": 1.0}, "place": b"p"}], schema=schema)


@pytest.fixture
def case(tmp_path: Path) -> ViewCase:
    return ViewCase(tmp_path, {"column_keys": {"secret": ["secret"]}, "unlisted_columns": "footer_key"})


def leaks(metadata: dict[bytes, bytes]) -> bool:
    decoded = [base64.b64decode(value) for key, value in metadata.items() if key == b"ARROW:schema"]
    return any(LEAK.encode() in value for value in [*metadata.values(), *decoded])


@pytest.mark.parametrize("denied_columns", ["error", "hide", "null"])
def test_nothing_of_a_refused_column_is_in_the_metadata(case: ViewCase, denied_columns: str) -> None:
    path = case.encrypt(parquet_bytes(table()))
    before = pq.read_metadata(pa.BufferReader(whole(case.view(path)))).metadata
    assert leaks(before) and before[b"highest"] == LEAK.encode()
    case.kms.deny("secret")
    found = pq.ParquetFile(pa.BufferReader(whole(case.view(path, denied_columns=denied_columns))))
    metadata = found.metadata.metadata
    assert not leaks(metadata)
    assert set(metadata) == {b"ARROW:schema", b"geo", b"pandas", b"org.apache.spark.version"}
    geo = json.loads(metadata[b"geo"])
    assert geo["primary_column"] == "place" and list(geo["columns"]) == ["place"]
    assert geo["columns"]["place"] == {"encoding": "WKB", "bbox": [1.5, 2.5, 3.5, 4.5]}
    pandas = json.loads(metadata[b"pandas"])
    shown = [] if denied_columns == "hide" else ["secret"]
    assert [column["name"] for column in pandas["columns"]] == ["id", *shown]
    assert pandas["index_columns"] == [*shown, "id"]
    schema = found.schema_arrow
    assert schema.names == ["id", *shown, "place"]
    assert schema.field("id").metadata[b"unit"] == b"pieces"
    assert "_PL_ENUM_VALUES" not in str(schema.to_string(truncate_metadata=False))


@pytest.mark.parametrize("denied_columns", ["error", "hide", "null"])
def test_nor_in_what_is_read_as_a_table(case: ViewCase, denied_columns: str) -> None:
    path = case.encrypt(parquet_bytes(table()))
    case.kms.deny("secret")
    keytools = case.keytools(denied_columns=denied_columns)
    columns = ["id"] if denied_columns == "error" else None
    for source in (path, path.parent):
        schema = keytools.dataset(source, columns=columns).schema
        assert LEAK not in schema.to_string(truncate_metadata=False)
    if denied_columns != "error":
        assert LEAK not in keytools.read_table(path).schema.to_string(truncate_metadata=False)
        assert not leaks(keytools.metadata(path).metadata)


def test_all_is_shown_to_who_may_read_all(case: ViewCase) -> None:
    metadata = pq.read_metadata(pa.BufferReader(whole(case.view(case.encrypt(parquet_bytes(table())))))).metadata
    assert {
        key.decode(): value.decode() for key, value in metadata.items() if key != b"ARROW:schema"
    } == KEY_VALUES


BROKEN: list[Any] = ["{", "[]", "1", "null", '"x"', '{"columns": 7}', '{"columns": {"place": 1}}', "[" * 5000]


@pytest.mark.parametrize("key", ["geo", "pandas", "ARROW:schema"])
@pytest.mark.parametrize("value", BROKEN, ids=range(len(BROKEN)))
def test_entries_that_are_not_what_they_should_be_are_left_out(case: ViewCase, key: str, value: str) -> None:
    plain = pa.table({"id": [1], "secret": [2.0], "place": [b""]}).replace_schema_metadata({key: value})
    path = case.encrypt(parquet_bytes(plain, store_schema=False))
    case.kms.deny("secret")
    metadata = pq.read_metadata(pa.BufferReader(whole(case.view(path, denied_columns="hide")))).metadata or {}
    assert key.encode() not in metadata


def test_a_file_whose_only_geometry_is_refused_is_no_longer_geographic(case: ViewCase) -> None:
    only = {**GEO, "columns": {"secret": {"encoding": "WKB", "bbox": BOX}}}
    path = case.encrypt(parquet_bytes(table().replace_schema_metadata({"geo": json.dumps(only)})))
    case.kms.deny("secret")
    metadata = pq.read_metadata(pa.BufferReader(whole(case.view(path, denied_columns="hide")))).metadata
    assert b"geo" not in metadata
