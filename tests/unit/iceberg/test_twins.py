"""An encrypted table and its plaintext twin, changed in the same ways: all reads of both are equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from iceberg_case import Lake
from pyiceberg.expressions import IsNull, NotNull
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import DoubleType, IntegerType, LongType, StringType
from soak import sample

from parquet_keytools.iceberg import create_table, load_table


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


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
    """Return new rows of a table's current schema."""
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
    table.delete("id in (3, 4, 57)")


def overwrite(table: Table) -> None:
    table.overwrite(rows_of(table, 200), "id > 30 and id > 35")


def append(start: int) -> Callable[[Table], None]:
    return lambda table: table.append(rows_of(table, start))


STEPS = [
    rename, append(50), delete, add, promote, append(70), drop_and_use_the_name_again, partition, append(90),
    overwrite, partition_otherwise, append(100), delete,
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
        "id in (3, 5, 52, 92, 201)",
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
    assert len(snapshots) > 8
    for one, other in sample(snapshots, 3, 0):
        assert read(encrypted, snapshot_id=one.snapshot_id) == read(plain, snapshot_id=other.snapshot_id)
    assert lake.findings(encrypted.metadata_location) == []


# --- names of columns that are not names in Avro ---


def twins(lake: Lake, schema: pa.Schema) -> tuple[Table, Table]:
    """Make a plaintext table, and an encrypted one."""
    catalog = lake.catalog()
    properties = {"format-version": "2", "write.object-storage.enabled": "true"}
    properties["write.object-storage.partitioned-paths"] = "false"
    plain: Table = catalog.create_table("db.plain", schema, properties=properties)
    return plain, create_table(catalog, "db.encrypted", schema, encryption_key="pii")


def assert_are_twins(lake: Lake) -> None:
    """Compare rows, projections, and the manifests' entries for each column."""
    plain, encrypted = lake.catalog().load_table("db.plain"), lake.load("db.encrypted")

    def rows_by_id(table: Table, **named: Any) -> pa.Table:
        return table.scan(**named).to_arrow().sort_by("id")

    def statistics(table: Table) -> list[str]:
        files = [task.file for task in table.scan().plan_files()]
        return sorted(
            repr(
                (
                    file.record_count,
                    dict(file.value_counts),
                    dict(file.null_value_counts),
                    dict(file.lower_bounds),
                    dict(file.upper_bounds),
                )
            )
            for file in files
        )

    assert rows_by_id(encrypted).equals(rows_by_id(plain)) and len(rows_by_id(plain))
    assert statistics(encrypted) == statistics(plain)
    for name in plain.schema().as_arrow().names:
        assert rows_by_id(encrypted, selected_fields=("id", name)).equals(
            rows_by_id(plain, selected_fields=("id", name))
        )
    assert lake.findings(encrypted.metadata_location) == []


ODD_NAMES = ["first name", "e-mail", "a.b", "2024", "\U0001f600", "a/b=`c`", "nul\0", "a.list.element", "x" * 300]


def test_columns_may_have_any_names(lake: Lake) -> None:
    def all_of(value: Any) -> dict[str, Any]:
        return dict.fromkeys(ODD_NAMES, value)

    def struct(kind: pa.DataType) -> pa.StructType:
        return pa.struct(list(all_of(kind).items()))

    rows = pa.table({"id": [1, 2, 3], **all_of(["x", None, "y"])})
    inner = pa.struct([*struct(pa.string()), ("more", pa.list_(struct(pa.int64())))])
    rows = rows.append_column("s", pa.array([{**all_of("a"), "more": [all_of(1)]}, None, {"more": []}], inner))
    rows = rows.append_column("l", pa.array([[{"a.b": "q"}], [], None], pa.list_(pa.struct({"a.b": pa.string()}))))
    kind = pa.map_(pa.string(), pa.struct({"nul\0": pa.float64()}))
    rows = rows.append_column("m", pa.array([[("k", {"nul\0": 1.5})], None, []], kind))
    plain, encrypted = twins(lake, rows.schema)
    for table in (plain, encrypted):
        table.append(rows)
        with table.update_spec() as spec:
            for name in ODD_NAMES:
                spec.add_field(name, IdentityTransform(), f"{name} part")
        table.append(rows)
        table.delete("id = 3")
        table.dynamic_partition_overwrite(rows.slice(1, 1))
    assert_are_twins(lake)


def test_columns_may_be_renamed_to_any_names(lake: Lake) -> None:
    before = pa.table({f"v{name}": ["x", None, "y"] for name in range(len(ODD_NAMES))} | {"id": [1, 2, 3]})
    after = before.rename_columns([*ODD_NAMES, "id"])
    plain, encrypted = twins(lake, before.schema)
    for table in (plain, encrypted):
        table.append(before)
        with table.update_schema() as update:
            for number, name in enumerate(ODD_NAMES):
                update.rename_column(f"v{number}", name)
        table.append(after)
        table.overwrite(after.slice(0, 1), "id = 1")
        table.upsert(pa.table({**{name: ["new"] for name in ODD_NAMES}, "id": [9]}), join_cols=["id"])
    assert_are_twins(lake)


@pytest.mark.parametrize("columns", [("a b", "a_x20b"), ("a.b", "a_x2Eb")])
def test_names_that_are_equal_in_a_file_are_refused_as_in_plaintext_tables(
    lake: Lake, columns: tuple[str, str]
) -> None:
    rows = pa.table({columns[0]: ["x"], columns[1]: [1]})
    for table in twins(lake, rows.schema):
        with pytest.raises(ValueError):
            table.append(rows)
        assert table.refresh().scan().to_arrow().num_rows == 0


# --- transactions ---

OLD = pa.table({"id": [1, 2], "a": ["x", "y"]})
WIDER = pa.table({"id": [3], "a": ["z"], "first name": [True]})


def widened_by_others(lake: Lake, table: Table) -> None:
    transaction = table.transaction()
    other = lake.catalog().load_table("db.plain") if table.name()[-1] == "plain" else lake.load("db.encrypted")
    with other.update_schema() as update:
        update.union_by_name(WIDER.schema)
    table.refresh()
    transaction.append(WIDER)
    transaction.commit_transaction()


def widened_by_the_table(_: Lake, table: Table) -> None:
    transaction = table.transaction()
    with table.update_schema() as update:
        update.union_by_name(WIDER.schema)
    transaction.append(WIDER)
    transaction.delete("id = 1")
    transaction.commit_transaction()


def widened_within(_: Lake, table: Table) -> None:
    with table.transaction() as transaction:
        transaction.append(OLD)
        with transaction.update_schema() as update:
            update.union_by_name(WIDER.schema)
        transaction.append(WIDER)
        with transaction.update_schema() as update:
            update.rename_column("a", "a.b")
        renamed = WIDER.rename_columns(["id", "a.b", "first name"])
        transaction.overwrite(renamed, "id = 1")
        transaction.delete("id = 2")


def widened_while_others_commit(lake: Lake, table: Table) -> None:
    other = lake.catalog().load_table("db.plain") if table.name()[-1] == "plain" else lake.load("db.encrypted")
    with table.transaction() as transaction:
        with transaction.update_schema() as update:
            update.union_by_name(WIDER.schema)
        transaction.append(WIDER)
        other.append(OLD)


def partitioned_within(_: Lake, table: Table) -> None:
    with table.transaction() as transaction:
        with transaction.update_schema() as update:
            update.union_by_name(WIDER.schema)
        with transaction.update_spec() as spec:
            spec.add_identity("first name")
        transaction.append(WIDER)
        transaction.delete("id = 1")


@pytest.mark.parametrize(
    "change",
    [
        widened_by_others,
        widened_by_the_table,
        widened_within,
        widened_while_others_commit,
        partitioned_within,
    ],
)
def test_a_transaction_sees_the_schema_that_plaintext_tables_see(
    lake: Lake, change: Callable[[Lake, Table], None]
) -> None:
    plain, encrypted = twins(lake, OLD.schema)
    for table in (plain, encrypted):
        table.append(OLD)
        change(lake, table)
    assert_are_twins(lake)


def test_a_transaction_with_a_snapshot_is_repeated_after_a_refresh(lake: Lake) -> None:
    _, table = twins(lake, OLD.schema)
    transaction = table.transaction()
    transaction.append(OLD)
    lake.load("db.encrypted").append(OLD)
    table.refresh()
    transaction.append(OLD)
    transaction.commit_transaction()
    assert lake.load("db.encrypted").scan().to_arrow().num_rows == table.scan().to_arrow().num_rows == 6
