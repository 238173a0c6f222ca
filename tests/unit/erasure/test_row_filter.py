import uuid
from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest

from parquet_keytools.erasure.rewrite import FileFilter, parse_filter
from parquet_keytools.errors import ConfigurationError

ONE = uuid.UUID(int=1)
TABLE = pa.table(
    {
        "id": pa.array([1, 2, None, 4711], pa.int64()),
        "name": ["a", "it's", None, "b"],
        "at": pa.array([datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2, 3, 4)], pa.timestamp("us", "UTC")),
        "day": [date(2026, 1, day) for day in (1, 2, 3, 4)],
        "land": pa.array(["DE", "FR", "DE", None]).dictionary_encode(),
        "price": pa.array([Decimal("1.50"), None, Decimal("2.00"), Decimal("9.99")], pa.decimal128(8, 2)),
        "share": pa.array([0.1, float("nan"), None, 0.5], pa.float32()),
        "zero": pa.array([0.0, -0.0, None, 0.1], pa.float32()),
        "ok": [True, False, None, True],
        "who": [{"id": 7}, None, {"id": None}, {"id": 9}],
        "a.b": [1, 2, 3, 4],
        "key": pa.array([ONE.bytes] + 3 * [uuid.UUID(int=2).bytes], pa.binary(16)),
        "list": [[1]] * 4,
    }
)


def rows(where: str) -> list[int]:
    """Return the positions of matching rows."""
    matches = FileFilter(parse_filter(where), TABLE.schema, {"region"}).matches(TABLE)
    return [position for position, found in enumerate(matches.to_pylist()) if found]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("id = 4711", [3]),
        ("id != 4711", [0, 1]),
        ("id <> 1", [1, 3]),
        ("id<=2", [0, 1]),
        ("id >= 2 and id < 4711", [1]),
        ("id IN (1, 2, 99)", [0, 1]),
        ("id IS NULL", [2]),
        ("id is not null AND name = 'it''s'", [1]),
        ("name > 'a'", [1, 3]),
        ("at < '2026-01-02T00:00:00Z'", [0]),
        ("day in ('2026-01-03', '2026-01-04')", [2, 3]),
        ("land = 'DE'", [0, 2]),
        ("land != 'DE'", [1]),
        ("price = 1.5", [0]),
        ("price >= -1", [0, 2, 3]),
        ("share = 0.1", [0]),
        ("zero = 0", [0, 1]),
        ("zero IN (0, 5)", [0, 1]),
        ("zero IN (-0, 0.1)", [0, 1, 3]),
        ("ok = true", [0, 3]),
        ("who.id = 9", [3]),
        ("who IS NULL", [1]),
        ("a.b = 3", [2]),
        ('"a.b" = 3', [2]),
        (f"key = '{ONE}'", [0]),
    ],
)
def test_which_rows_match(where: str, expected: list[int]) -> None:
    assert rows(where) == expected


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("", "at its end"),
        ("id", "at 'id'"),
        ("id = ", "at 'id ='"),
        ("id == 1", "at 'id == 1'"),
        ("id = 1 OR id = 2", "at 'id = 1 OR id = 2'"),
        ("id = 1)", r"at 'id = 1\)'"),
        ("id = 1 AND", "at its end"),
        ("id IN ()", r"at 'id IN \(\)'"),
        ("id NOT IN (1)", "at 'id NOT"),
        ("id = 4711abc", "at 'id = 4711abc'"),
        ("name = 'open", "at"),
        ("id = name", "at 'id = name'"),
        ("id = 1 AND name = 2 OR", "at 'name = 2 OR'"),
        ("idd = 1", "no column 'idd'. Did you mean 'id'"),
        ("id = '1'", "without single quotes"),
        ("name = 1", "with single quotes"),
        ("id = 1.5", "'id' is int64"),
        ("id = 99999999999999999999", "'id' is int64"),
        ("id IN (1, 'a')", "several types"),
        ("price = 1.005", "'price' is decimal"),
        ("at = '2026-01-01'", "'at' is timestamp"),
        ("day = 'tomorrow'", "'day' is date32"),
        ("ok = 'yes'", "without single quotes"),
        ("list = 1", "cannot compare"),
        ("who = 1", "cannot compare"),
        ("key = 'x'", "'key' is fixed_size_binary"),
        ("id = 1 AND region = 'eu'", "'region' is in the names of folders"),
    ],
)
def test_what_is_refused(where: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        rows(where)


def test_a_column_of_the_file_and_of_its_folders_is_ambiguous() -> None:
    with pytest.raises(ConfigurationError, match="'id' is in the names of folders"):
        FileFilter(parse_filter("id = 1"), TABLE.schema, {"id"})
