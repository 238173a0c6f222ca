"""Encrypted tables that are partitioned: values of partitions are in manifests alone, never in names of files."""

from __future__ import annotations

import datetime
from pathlib import Path

import pyarrow as pa
import pytest
from iceberg_case import CANARY, Lake, rows
from pyiceberg.expressions import EqualTo
from pyiceberg.table import Table
from pyiceberg.transforms import (
    BucketTransform,
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    TruncateTransform,
    VoidTransform,
    YearTransform,
)

from parquet_keytools.iceberg import create_table


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


@pytest.mark.parametrize(
    "properties",
    [
        {"write.object-storage.enabled": "false"},
        {"write.object-storage.partitioned-paths": "true"},
        {"write.py-location-provider.impl": "pyiceberg.table.locations.SimpleLocationProvider"},
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
    # What a table says stays as it is: PyIceberg's writers alone see something else.
    assert lake.metadata()["properties"].items() >= properties.items()
    assert not any(name.startswith("commit.") for name in lake.metadata()["properties"])
    assert table.refresh().properties.items() >= properties.items()


TRANSFORMS = {
    "id": [BucketTransform(4), TruncateTransform(3), IdentityTransform()],
    "name": [BucketTransform(5), TruncateTransform(2), IdentityTransform(), VoidTransform()],
    "at": [YearTransform(), MonthTransform(), DayTransform(), HourTransform(), BucketTransform(3)],
    "born": [YearTransform(), MonthTransform(), DayTransform()],
}


@pytest.mark.parametrize("column", TRANSFORMS)
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
