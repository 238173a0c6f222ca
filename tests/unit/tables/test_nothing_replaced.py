from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from parquet_keytools import Keytools
from parquet_keytools.errors import OutputError

TABLE = pa.table({"id": [1, 2], "name": ["a", "b"]})
KEYS = {"footer": "QUFBQUFBQUFBQUFBQUFBQQ==", "pii": "QkJCQkJCQkJCQkJCQkJCQg=="}
TABLES = {
    "by pyarrow": {"footer_key": "footer", "column_keys": {"pii": ["id", "name"]}},
    "by the module encryptor": {"footer_key": "footer", "column_keys": {"pii": ["name"]}, "aad_prefix": "t"},
    "external": {"footer_key": "footer", "column_keys": {"pii": ["name"]}, "key_material": "external"},
}


@pytest.fixture(params=TABLES, ids=str)
def keytools(request: pytest.FixtureRequest) -> Keytools:
    table = {**TABLES[request.param], "unlisted_columns": "footer_key"}
    return Keytools.from_mapping(
        {"version": 1, "kms": {"type": "in_memory", "keys": KEYS}, "tables": {"t": table}}
    )


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def by_table(keytools: Keytools, path: Path, meanwhile: Callable[[], object]) -> None:
    def batches():
        yield from TABLE.to_batches()
        meanwhile()

    reader = pa.RecordBatchReader.from_batches(TABLE.schema, batches())
    keytools.write_table(reader, path, overwrite=False)


def by_writer(keytools: Keytools, path: Path, meanwhile: Callable[[], object]) -> None:
    with keytools.writer(path, TABLE.schema, overwrite=False) as writer:
        writer.write_table(TABLE)
        meanwhile()


def by_dataset(keytools: Keytools, path: Path, meanwhile: Callable[[], object]) -> None:
    def batches():
        yield from TABLE.to_batches()
        meanwhile()

    reader = pa.RecordBatchReader.from_batches(TABLE.schema, batches())
    keytools.write_dataset(
        reader,
        path.parent,
        overwrite=False,
        basename_template="data{i}.parquet",
        existing_data_behavior="overwrite_or_ignore",
    )


WRITERS = pytest.mark.parametrize("write", [by_table, by_writer, by_dataset])


@WRITERS
def test_an_existing_file_is_not_replaced(keytools: Keytools, tmp_path: Path, write) -> None:
    path = tmp_path / "data0.parquet"
    write(keytools, path, lambda: None)
    assert keytools.read_table(path).equals(TABLE)
    before = content(tmp_path)
    with pytest.raises(OutputError, match="exists already"):
        write(keytools, path, lambda: None)
    assert content(tmp_path) == before


@WRITERS
def test_a_file_that_appears_meanwhile_is_not_replaced(keytools: Keytools, tmp_path: Path, write) -> None:
    path = tmp_path / "data0.parquet"
    with pytest.raises(OutputError, match="exists already"):
        write(keytools, path, lambda: path.write_bytes(b"another writer's"))
    assert content(tmp_path) == {str(path): b"another writer's"}


def test_a_data_set_that_replaces_nothing_deletes_nothing(keytools: Keytools, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="contradict"):
        keytools.write_dataset(
            ds.dataset(TABLE), tmp_path, overwrite=False, existing_data_behavior="delete_matching"
        )
