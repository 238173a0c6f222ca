"""The data that every engine writes and reads, and the master keys."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from engines.policy import Policy

MASTER_KEYS = {"footer": b"footer-key-16-by", "pii": b"pii-key-16-bytes", "place": b"place-key-16-byt"}
COLUMN_KEYS = {
    "pii": ("name", "amount", "tags.list.element"),
    "place": ("place.city", "place.latitude", "place.at.hour"),
}
"""Master key -> leaf columns under it; `id`, `price` and `seen` are in none."""

ROWS = 600
ROW_GROUP_ROWS = 250
PAGE_ROWS = 60

_START = dt.datetime(2024, 2, 28, 12, 0, 0, 1, tzinfo=dt.UTC)


def _row(number: int) -> dict[str, object]:
    return {
        "id": number,
        "price": None if number % 7 == 0 else number / 8,
        "seen": _START + dt.timedelta(hours=number),
        "name": None if number % 5 == 0 else f"name {number % 11}",
        "amount": Decimal(number) / 100 - 3,
        "tags": None if number % 13 == 0 else [f"tag {number}" if n else None for n in range(number % 4)],
        "place": None
        if number % 17 == 0
        else {
            "city": f"city {number}",
            "latitude": None if number % 3 == 0 else number / 10,
            "at": {"hour": number % 24},
        },
    }


SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("price", pa.float64()),
        ("seen", pa.timestamp("us", "UTC")),
        ("name", pa.string()),
        ("amount", pa.decimal128(9, 2)),
        ("tags", pa.list_(pa.field("element", pa.string()))),
        (
            "place",
            pa.struct(
                [("city", pa.string()), ("latitude", pa.float64()), ("at", pa.struct([("hour", pa.int32())]))]
            ),
        ),
    ]
)
TABLE = pa.Table.from_pylist([_row(number) for number in range(ROWS)], SCHEMA)
FLAT_COLUMNS = [field.name for field in SCHEMA if not pa.types.is_nested(field.type)]
BLOOM_FILTERS: dict[str, Any] = {
    "bloom_filter_options": {"id": {"ndv": ROWS, "fpp": 0.01}, "name": {"ndv": 11, "fpp": 0.01}}
}


def sample(policy: Policy) -> pa.Table:
    """Return the data."""
    return TABLE.select(FLAT_COLUMNS) if policy.flat else TABLE


def column_keys(policy: Policy) -> dict[str, list[str]]:
    """Return key name -> leaf columns under it."""
    return {name: list(columns) for name, columns in COLUMN_KEYS.items()} if policy.column_keys else {}


def write_options(policy: Policy) -> dict[str, Any]:
    """Return pyarrow's layout options: several row groups and pages, page index, CRCs."""
    return {
        "row_group_size": ROW_GROUP_ROWS,
        "max_rows_per_page": ROWS if policy.flat else PAGE_ROWS,
        "write_batch_size": PAGE_ROWS,
        "data_page_version": f"{policy.data_page_version}.0",
        "write_page_index": True,
        "write_page_checksum": True,
    }


def write_plain(path: Path, policy: Policy) -> Path:
    """Write the data as a plaintext file, with Bloom filters too."""
    bloom_filters = {} if policy.flat else BLOOM_FILTERS
    pq.write_table(sample(policy), path, **write_options(policy), **bloom_filters)
    return path
