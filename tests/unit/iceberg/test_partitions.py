"""Encrypted tables that are partitioned: partition values are only in manifests, never in file names."""

from __future__ import annotations

import datetime
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from iceberg_case import CANARY, Lake, rows
from pyiceberg.exceptions import ValidationError, ValidationException
from pyiceberg.expressions import EqualTo, IsNull
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import (
    BucketTransform,
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    Transform,
    TruncateTransform,
    UnknownTransform,
    VoidTransform,
    YearTransform,
)
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IcebergType,
    IntegerType,
    LongType,
    NestedField,
    StringType,
    TimestampNanoType,
    TimestampType,
    TimestamptzNanoType,
    TimestamptzType,
    TimeType,
    UnknownType,
    UUIDType,
)
from soak import SOAK

from parquet_keytools.errors import FormatLimitError
from parquet_keytools.iceberg import create_table
from parquet_keytools.iceberg.encrypted_table import HIDDEN_PARTITIONS


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


@pytest.mark.parametrize(
    "properties",
    [
        {"write.object-storage.enabled": "false"},
        {"write.object-storage.partitioned-paths": "true"},
        {"write.summary.partition-limit": "100"},
    ],
)
def test_no_property_puts_values_of_partitions_into_names(lake: Lake, properties: dict[str, str]) -> None:
    table = lake.create(properties=properties)
    with table.update_spec() as spec:
        spec.add_identity("name")
    with table.transaction() as transaction:
        transaction.set_properties(properties)
        transaction.append(rows(0, 3))
        transaction.overwrite(rows(1, 2), "id = 2")
    lake.load().dynamic_partition_overwrite(rows(0, 1))
    assert lake.ids() == lake.outside_ids() == [0, 1, 1]
    lake.assert_no_plaintext()
    # The table's own metadata stays as it is: only PyIceberg's writers see something else.
    assert lake.metadata()["properties"].items() >= properties.items()
    assert not any(name.startswith("commit.") for name in lake.metadata()["properties"])
    assert table.refresh().properties.items() >= properties.items()


TRANSFORMS = {
    "id": [BucketTransform(4), TruncateTransform(3), IdentityTransform()],
    "name": [TruncateTransform(2), IdentityTransform(), VoidTransform(), *([BucketTransform(5)] if SOAK else [])],
    "at": [YearTransform(), MonthTransform(), DayTransform(), HourTransform(), BucketTransform(3)],
    "born": [YearTransform(), MonthTransform(), DayTransform()],
}


# Numbers, times and dates: below, too.
@pytest.mark.parametrize("column", TRANSFORMS if SOAK else ["name"])
def test_each_transform_partitions_and_says_nothing(lake: Lake, column: str) -> None:
    at = datetime.datetime(2001, 2, 3, 4)
    table = rows(0, 9)
    table = table.append_column("at", pa.array([at + datetime.timedelta(days=9 * n) for n in range(9)]))
    table = table.append_column("born", pa.array([at.date() + datetime.timedelta(days=40 * n) for n in range(9)]))
    for number, transform in enumerate(TRANSFORMS[column]):
        name = f"db.t{number}"
        created = create_table(lake.catalog(), name, table.schema, encryption_key="pii")
        with created.update_spec() as spec:
            spec.add_field(column, transform, "part")
        created.append(table)
        created.delete("id = 4")
        twin = lake.catalog().create_table(f"db.plain{number}", table.schema)
        with twin.update_spec() as spec:
            spec.add_field(column, transform, "part")
        twin.append(table)
        twin.delete("id = 4")
        value = table[column][2].as_py()
        for row_filter in ("id > 2", EqualTo(column, value=value)):
            read, expected = (
                t.scan(row_filter=row_filter).to_arrow().sort_by("id") for t in (lake.load(name), twin)
            )
            assert read.equals(expected) and len(read)

        def partitions(table: Table) -> list[tuple[str, int]]:
            files = [task.file for task in table.scan().plan_files()]
            return sorted((repr(file.partition), file.record_count) for file in files)

        assert partitions(lake.load(name)) == partitions(twin)
        lake.catalog().purge_table(f"db.plain{number}")
        paths = [str(path.relative_to(lake.warehouse)) for path in lake.warehouse.glob(f"db/t{number}/**/*")]
        assert not any("part=" in path or "=" in path for path in paths)
    for path in lake.warehouse.glob("db/t*/**/*"):
        assert CANARY not in str(path) and (path.is_dir() or CANARY.encode() not in path.read_bytes())


# --- every type of column, by every transform ---

LAST = datetime.datetime(9999, 12, 31, 23, 59, 59, 999999)


def decimals(precision: int, scale: int) -> tuple[IcebergType, pa.DataType, list[Any]]:
    """Values whose bytes PyIceberg would read as a length: large, negative, and small numbers."""
    digits = "9" * precision
    values = [Decimal(f"{sign}{number}E-{scale}") for sign in ("", "-") for number in (digits, "1")]
    return DecimalType(precision, scale), pa.decimal128(precision, scale), [*values, Decimal(f"0E-{scale}")]


COLUMNS: dict[str, tuple[IcebergType, pa.DataType, list[Any]]] = {
    "boolean": (BooleanType(), pa.bool_(), [True, False]),
    "int": (IntegerType(), pa.int32(), [-(2**31), 2**31 - 1, 0, -1]),
    "long": (LongType(), pa.int64(), [-(2**63), 2**63 - 1, 0, -1]),
    "float": (FloatType(), pa.float32(), [-1.5, math.inf, -math.inf, 0.0]),
    "double": (DoubleType(), pa.float64(), [5e-324, 1.7976931348623157e308, -math.inf, 0.0]),
    "decimal1": decimals(1, 0),
    "decimal4": decimals(4, 2),
    "decimal9": decimals(9, 2),
    "decimal18": decimals(18, 18),
    "decimal19": decimals(19, 4),
    "decimal38": decimals(38, 38),
    "date": (DateType(), pa.date32(), [datetime.date.min, datetime.date(1969, 12, 31), LAST.date()]),
    "time": (TimeType(), pa.time64("us"), [datetime.time.min, datetime.time.max]),
    "timestamp": (TimestampType(), pa.timestamp("us"), [datetime.datetime.min, LAST]),
    "timestamptz": (
        TimestamptzType(),
        pa.timestamp("us", "UTC"),
        [datetime.datetime(1969, 12, 31, 23, 59, tzinfo=datetime.UTC), LAST.replace(tzinfo=datetime.UTC)],
    ),
    "string": (StringType(), pa.large_string(), ["", "a/b=c d", "\u00e9\U0001f600", "x" * 300]),
    "uuid": (UUIDType(), pa.uuid(), [bytes(16), b"\xff" * 16]),
    "fixed": (FixedType(5), pa.binary(5), [bytes(5), b"\xff" * 5, b"ab/cd"]),
    "binary": (BinaryType(), pa.large_binary(), [b"", b"\xff\0", b"x" * 40]),
}

ALL: list[Transform[Any, Any]] = [
    IdentityTransform(),
    BucketTransform(4),
    TruncateTransform(3),
    YearTransform(),
    MonthTransform(),
    DayTransform(),
    HourTransform(),
    VoidTransform(),
]
NOT_IN_PYICEBERG = {("time", "bucket"), ("uuid", "identity"), ("uuid", "void"), ("binary", "truncate")}
"""Plain tables of PyIceberg 0.12 refuse to append these."""


def every_value(columns: dict[str, tuple[IcebergType, pa.DataType, list[Any]]]) -> pa.Table:
    """Return rows with each value of each column, and a null."""
    height = max(len(values) for _, _, values in columns.values()) + 1
    arrays: dict[str, Any] = {"id": pa.array(range(height), pa.int64())}
    for name, (_, kind, values) in columns.items():
        padded = [*values, *[None] * (height - len(values))]
        storage = kind.storage_type if isinstance(kind, pa.UuidType) else kind
        array = pa.array(padded, storage)
        arrays[name] = pa.ExtensionArray.from_storage(kind, array) if storage is not kind else array
    return pa.table(arrays)


def schema_of(columns: dict[str, tuple[IcebergType, pa.DataType, list[Any]]]) -> Schema:
    kinds: dict[str, IcebergType] = {"id": LongType(), **{name: kind for name, (kind, _, _) in columns.items()}}
    return Schema(*(NestedField(1 + n, name, kinds[name], required=False) for n, name in enumerate(kinds)))


def spec_of(schema: Schema, transform: Transform[Any, Any]) -> PartitionSpec:
    columns = {column.field_id: column.name for column in schema.fields[1:]}
    return PartitionSpec(*(PartitionField(id_, 999 + id_, transform, f"p {columns[id_]}") for id_ in columns))


# Bucket values are numbers, and truncated values keep their type: the first and the last transform cover both.
@pytest.mark.parametrize("transform", ALL if SOAK else [IdentityTransform(), DayTransform()], ids=str)
def test_each_type_by_each_transform_does_what_a_plaintext_table_does(
    lake: Lake, transform: Transform[Any, Any]
) -> None:
    name_of = str(transform).partition("[")[0]
    columns = {
        name: column
        for name, column in COLUMNS.items()
        if transform.can_transform(column[0]) and (name, name_of) not in NOT_IN_PYICEBERG
    }
    values, schema = every_value(columns), schema_of(columns)
    spec = spec_of(schema, transform)
    properties = {"format-version": "2", **HIDDEN_PARTITIONS}
    catalog = lake.catalog()
    plain: Table = catalog.create_table("db.plain", schema, partition_spec=spec, properties=properties)
    ours: Table = create_table(catalog, "db.t", schema, encryption_key="pii", partition_spec=spec)
    for table in (plain, ours):
        table.append(values)
        table.append(values.slice(1, 2))
        table.delete("id = 0")
        table.overwrite(values.slice(1, 1), "id = 1")
        if name_of == "identity":
            table.dynamic_partition_overwrite(values.slice(2, 1))
        with table.update_spec() as update:
            update.remove_field(spec.fields[0].name)
            update.add_field("id", BucketTransform(2), "later")
        table.append(values)
        table.delete("id = 2")

    def found(table: Table, row_filter: Any = "id >= 0") -> pa.Table:
        return table.scan(row_filter=row_filter).to_arrow().sort_by("id")

    def partitions(table: Table) -> list[tuple[str, int]]:
        files = [task.file for task in table.scan().plan_files()]
        return sorted((repr(file.partition), file.record_count) for file in files)

    ours = lake.load("db.t")
    assert found(ours).equals(found(plain)) and len(found(ours)) >= 3
    assert partitions(ours) == partitions(plain)
    for column in {"decimal9", "decimal38", "long", "string"} & columns.keys():
        for row_filter in (IsNull(column), EqualTo(column, value=columns[column][2][1])):
            assert found(ours, row_filter).equals(found(plain, row_filter)) and len(found(ours, row_filter))
    assert lake.load("db.t").rotate()
    ours = lake.load("db.t")
    ours.maintenance.expire_snapshots().older_than(datetime.datetime.now() + datetime.timedelta(days=1)).commit()
    assert lake.load("db.t").remove_unneeded_keys()
    assert found(lake.load("db.t")).equals(found(plain))
    assert lake.findings(lake.load("db.t").metadata_location) == []


def test_partition_fields_whose_type_has_the_same_name_in_avro_are_refused(lake: Lake) -> None:
    columns = {name: COLUMNS[name.removesuffix(" b")] for name in ("decimal9", "decimal9 b")}
    values, schema = every_value(columns), schema_of(columns)
    table = create_table(
        lake.catalog(), "db.t", schema, encryption_key="pii", partition_spec=spec_of(schema, IdentityTransform())
    )
    with pytest.raises(FormatLimitError, match="partitioned by 'p decimal9 b'"):
        table.append(values)


NANOSECONDS = {
    "ns": (TimestampNanoType(), pa.timestamp("ns"), [1, -1, 2**62]),
    "ns_utc": (TimestamptzNanoType(), pa.timestamp("ns", "UTC"), [1, -1, 2**62]),
}
"""In format version 3, in which PyIceberg 0.12 writes no plaintext table."""


@pytest.mark.parametrize(
    "transform",
    [BucketTransform(4), MonthTransform(), *([YearTransform(), DayTransform()] if SOAK else [])],
    ids=str,
)
def test_nanoseconds_are_partitioned(lake: Lake, transform: Transform[Any, Any]) -> None:
    values, schema = every_value(NANOSECONDS), schema_of(NANOSECONDS)
    table = create_table(
        lake.catalog(), "db.t", schema, encryption_key="pii", partition_spec=spec_of(schema, transform)
    )
    table.append(values)
    table.append(values)
    table.delete("id = 0")
    expected = pa.concat_tables([values.slice(1)] * 2).sort_by("id")
    assert lake.load("db.t").scan().to_arrow().sort_by("id").equals(expected)
    assert lake.findings(table.metadata_location) == []


@pytest.mark.parametrize(
    ("column", "transform"),
    [("ns", IdentityTransform()), ("ns_utc", VoidTransform()), ("unknown", IdentityTransform())],
    ids=str,
)
def test_what_no_reader_of_manifests_could_read_is_not_appended(
    lake: Lake, column: str, transform: Transform[Any, Any]
) -> None:
    columns = {column: {**NANOSECONDS, "unknown": (UnknownType(), pa.null(), [None])}[column]}
    values, schema = every_value(columns), schema_of(columns)
    table = create_table(
        lake.catalog(), "db.t", schema, encryption_key="pii", partition_spec=spec_of(schema, transform)
    )
    files = list(lake.warehouse.rglob("*"))
    with pytest.raises(FormatLimitError, match=f"partitioned by 'p {column}'"):
        table.append(values)
    assert list(lake.warehouse.rglob("*")) == files
    assert lake.load("db.t").scan().to_arrow().num_rows == 0
    # Without this field, the rows are appended.
    with table.update_spec() as update:
        update.remove_field(f"p {column}")
    table.append(values)
    assert lake.load("db.t").scan().to_arrow().equals(values)
    assert lake.findings(table.metadata_location) == []


def test_a_transform_that_pyiceberg_does_not_know_is_refused_as_in_plaintext_tables(lake: Lake) -> None:
    schema, values = schema_of({"long": COLUMNS["long"]}), every_value({"long": COLUMNS["long"]})
    spec = spec_of(schema, UnknownTransform("zorder"))
    for table in (
        lake.catalog().create_table("db.plain", schema, partition_spec=spec),
        create_table(lake.catalog(), "db.t", schema, encryption_key="pii", partition_spec=spec),
    ):
        with pytest.raises(ValidationError):
            table.append(values)
        assert table.refresh().scan().to_arrow().num_rows == 0


@pytest.mark.parametrize("is_same_transaction", [False, True])
def test_a_repeated_commit_never_lists_files_under_another_partition_spec(
    lake: Lake, is_same_transaction: bool
) -> None:
    table = pa.table({"id": pa.array(range(4), pa.int64()), "other": pa.array(range(100, 104), pa.int64())})
    created = lake.create(table.schema)
    with created.update_spec() as spec:
        spec.add_identity("id")
    created.append(table.slice(0, 1))

    def change_spec(transaction: Any) -> None:
        with transaction.update_spec() as spec:
            spec.remove_field("id")
            spec.add_identity("other")

    transaction, others = lake.load().transaction(), lake.load()
    transaction.append(table.slice(1, 2))
    change_spec(transaction if is_same_transaction else others)
    others.append(table.slice(3, 1))
    files = lake.files()
    with pytest.raises(ValidationException, match="partition spec changed"):
        transaction.commit_transaction()
    assert lake.files() < files
    # The rewritten rows are found by the fields of the new spec.
    with lake.load().transaction() as again:
        if is_same_transaction:
            change_spec(again)
        again.append(table.slice(1, 2))
    assert lake.load().scan(row_filter="other = 101").to_arrow()["id"].to_pylist() == [1]
    lake.load().delete("other < 50")
    assert lake.ids() == lake.outside_ids() == [0, 1, 2, 3]
