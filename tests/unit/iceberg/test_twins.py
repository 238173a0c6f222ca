"""An encrypted table and its plaintext twin, changed in the same ways: each read of both is equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from iceberg_case import Lake
from pyiceberg.expressions import IsNull, NotNull
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import DoubleType, IntegerType, LongType, StringType

from parquet_keytools.iceberg import create_table, load_table

FIRST = pa.table(
    {
        "id": pa.array(range(40), pa.int32()),
        "name": [f"n{n}" for n in range(40)],
        "part": ["a", "b"] * 20,
        "place": [{"x": n, "y": f"y{n}"} if n % 7 else None for n in range(40)],
        "tags": [[f"t{n}", None] if n % 5 else None for n in range(40)],
    }
)


def rows_of(table: Table, start: int) -> pa.Table:
    """Return new rows of the schema that a table has now."""
    schema = table.schema().as_arrow()
    ids = range(start, start + 10)
    values: dict[str, Any] = {
        "name": [f"n{n}" for n in ids],
        "full_name": [f"f{n}" for n in ids],
        "part": ["a", "c"] * 5,
    }
    columns = []
    for field in schema:
        if field.name == "id":
            columns.append(pa.array(ids, field.type))
        elif pa.types.is_struct(field.type):
            inner = [{f.name: (n if pa.types.is_integer(f.type) else None) for f in field.type} for n in ids]
            columns.append(pa.array(inner, field.type))
        elif field.name in values:
            columns.append(pa.array(values[field.name], field.type))
        else:
            columns.append(pa.nulls(10, field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def rename(table: Table) -> None:
    with table.update_schema() as update:
        update.rename_column("name", "full_name").rename_column("place.x", "ex")


def add(table: Table) -> None:
    with table.update_schema() as update:
        update.add_column("weight", DoubleType()).add_column(("place", "z"), IntegerType())


def promote(table: Table) -> None:
    with table.update_schema() as update:
        update.update_column("id", LongType())


def drop_and_use_the_name_again(table: Table) -> None:
    with table.update_schema() as update:
        update.delete_column("tags")
    with table.update_schema() as update:
        update.add_column("tags", StringType())
    with table.update_schema() as update:
        update.move_first("weight").delete_column("place.y")


def partition(table: Table) -> None:
    with table.update_spec() as spec:
        spec.add_field("part", IdentityTransform(), "p")


def partition_otherwise(table: Table) -> None:
    with table.update_spec() as spec:
        spec.remove_field("p")


def delete(table: Table) -> None:
    table.delete("id in (3, 4, 45, 57)")


def overwrite(table: Table) -> None:
    table.overwrite(rows_of(table, 200), "id > 30 and id > 35")


def append(start: int) -> Callable[[Table], None]:
    return lambda table: table.append(rows_of(table, start))


STEPS = [
    append(40), rename, append(50), delete, add, append(60), promote, append(70), drop_and_use_the_name_again,
    append(80), partition, append(90), overwrite, partition_otherwise, append(100), delete,
]  # fmt: skip


def read(table: Table, **arguments: Any) -> list[dict[str, Any]]:
    return table.scan(**arguments).to_arrow().sort_by("id").to_pylist()


def test_each_read_of_a_table_that_changed_equals_that_of_its_plaintext_twin(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    catalog = lake.catalog()
    twins = [
        create_table(catalog, "db.people", FIRST.schema, encryption_key="pii"),
        catalog.create_table("db.plain", FIRST.schema),
    ]
    for table in twins:
        table.append(FIRST)
    for step in STEPS:
        for table in twins:
            step(table)
        encrypted, plain = load_table(catalog, "db.people"), catalog.load_table("db.plain")
        assert read(encrypted) == read(plain)
    for row_filter in (
        "id > 44",
        "id in (3, 5, 47, 92, 201)",
        IsNull("weight"),
        NotNull("full_name"),
        "part = 'c'",
    ):
        found = read(encrypted, row_filter=row_filter)
        assert found == read(plain, row_filter=row_filter) and found
    fields = ("id", "full_name", "place.ex", "tags")
    assert read(encrypted, selected_fields=fields) == read(plain, selected_fields=fields)
    # Each snapshot, under its own schema.
    snapshots = list(zip(encrypted.metadata.snapshots, plain.metadata.snapshots, strict=True))
    assert len(snapshots) > 10
    for one, other in snapshots:
        assert read(encrypted, snapshot_id=one.snapshot_id) == read(plain, snapshot_id=other.snapshot_id)
    assert lake.findings(encrypted.metadata_location) == []
