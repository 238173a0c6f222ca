"""How many bytes of a file that pyarrow cannot decrypt are read: ranges, not the whole file."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from unit.tables.test_file_writer import tools

from parquet_keytools.storage.locations import ArrowSource

ROWS = 200_000
TABLE = pa.table(dict.fromkeys(("id", "name", "x", "y"), pa.array(range(ROWS))))


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counted: list[int] = []
    read_at = ArrowSource.read_at

    def counting(source: ArrowSource, offset: int, length: int) -> bytes:
        counted.append(length)
        return read_at(source, offset, length)

    monkeypatch.setattr(ArrowSource, "read_at", counting)
    return counted


def test_a_file_with_a_prefix_that_is_not_stored_is_read_by_ranges(tmp_path: Path, read_bytes: list[int]) -> None:
    keytools = tools({"aad_prefix": "{file_name}", "store_aad_prefix": False})
    path = tmp_path / "x.parquet"
    keytools.write_table(
        TABLE, path, row_group_size=20_000, use_dictionary=False, compression="none", write_page_index=True
    )
    size = path.stat().st_size
    assert size > ROWS * 32
    keytools.write_dataset(TABLE, tmp_path / "data", max_rows_per_group=20_000)
    read_bytes.clear()
    assert keytools.read_table(path, columns=["name"]).equals(TABLE.select(["name"]))
    assert sum(read_bytes) < size * 0.3
    read_bytes.clear()
    one_group = keytools.read_table(path, columns=["id"], filters=[("id", "<", 5)])
    assert one_group["id"].to_pylist() == [0, 1, 2, 3, 4]
    assert sum(read_bytes) < size * 0.05
    read_bytes.clear()
    keytools.write_table(TABLE, tmp_path / "data" / "x.parquet", row_group_size=20_000, use_dictionary=False)
    (tmp_path / "data" / "part-0.parquet").unlink()
    found = keytools.dataset(tmp_path / "data").to_table(columns=["y"], filter=ds.field("id") == 3)
    assert found["y"].to_pylist() == [3]
    assert sum(read_bytes) < size * 0.1
