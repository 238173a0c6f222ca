"""Writers times readers: each cell reads right, or fails for a reason that names whose limit it is."""

from __future__ import annotations

import struct
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from engines import policy as policies
from engines.duckdb_engine import DuckDb
from engines.ours import ARROW_PATH, DATA_KEYS, MODULE_PATH, keytools
from engines.policy import Policy
from engines.sample import BLOOM_FILTERS, FLAT_COLUMNS, TABLE, write_options
from matrix import DUCKDB, ENGINES, ON_SPARK, PYARROW, ROWS, EncryptedFile, Matrix, said_of, tables, tables_of_page

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.structs import FileCryptoMetaData


@pytest.mark.parametrize("reader", [engine for engine in ENGINES if engine not in ON_SPARK])
@pytest.mark.parametrize(
    ("writer", "policy"),
    [pytest.param(*row, id=f"{row[0]}-{row[1].title}") for row in ROWS if row[0] not in ON_SPARK],
)
def test_without_spark(matrix: Matrix, writer: str, policy: Policy, reader: str) -> None:
    limit = matrix.outcome(writer, policy, reader)
    assert limit is None or said_of(limit) in tables_of_page()


@pytest.mark.parametrize(("writer", "policy"), [pytest.param(*row, id=f"{row[0]}-{row[1].title}") for row in ROWS])
def test_with_spark(matrix_with_spark: Matrix, writer: str, policy: Policy) -> None:
    for reader in ENGINES if writer in ON_SPARK else ON_SPARK:
        matrix_with_spark.outcome(writer, policy, reader)


def test_the_documentation_shows_what_was_found(matrix_with_spark: Matrix) -> None:
    assert tables_of_page() == tables(matrix_with_spark), "run: python tests/interop/matrix.py"


def test_a_table_that_the_module_encryptor_writes(matrix: Matrix) -> None:
    path = matrix.file(PYARROW, policies.COLUMN_KEYS).path.with_name("bloom.parquet")
    policy = policies.COLUMN_KEYS
    result = keytools(policy).write_table(TABLE, path, **write_options(policy), **BLOOM_FILTERS)
    assert result.engine == "module encryptor"
    table = matrix.engines[PYARROW].read(EncryptedFile("ours", policy, path))
    assert table.to_pylist() == TABLE.to_pylist()


def test_a_file_of_duckdb_is_named(matrix: Matrix) -> None:
    file = matrix.file(DUCKDB, policies.DATA_KEYS_FLAT)
    with pytest.raises(ParquetFormatError, match=r"no aad_file_unique.*DuckDB"):
        matrix.engines[ARROW_PATH].read(file)


def test_duckdb_uses_no_aad(matrix: Matrix) -> None:
    content = matrix.file(DUCKDB, policies.DATA_KEYS_FLAT).path.read_bytes()
    (length,) = struct.unpack("<I", content[-8:-4])
    footer = content[-8 - length : -8]
    _, end = FileCryptoMetaData.read(footer)
    module = footer[end:]
    assert AESGCM(DATA_KEYS["footer"]).decrypt(module[4:16], module[16:], b"")


FLAT = TABLE.select(FLAT_COLUMNS)


@pytest.mark.parametrize(
    ("table", "options", "readable"),
    [
        pytest.param(FLAT, {}, True, id="flat"),
        pytest.param(FLAT, {"row_group_size": 100, "write_page_index": True}, True, id="row groups, page index"),
        pytest.param(TABLE.select(["tags"]), {}, False, id="list"),
        pytest.param(TABLE.select(["place"]), {}, False, id="struct"),
        pytest.param(FLAT, {"max_rows_per_page": 50, "write_batch_size": 50}, False, id="several pages a chunk"),
        pytest.param(FLAT, {"data_page_version": "2.0"}, True, id="V2 pages"),
        pytest.param(FLAT, BLOOM_FILTERS, False, id="Bloom filters"),
    ],
)
def test_what_duckdb_reads(tmp_path: Path, table: pa.Table, options: dict[str, object], readable: bool) -> None:
    """The limits that the matrix names together, each by itself."""
    pq.write_table(table, tmp_path / "plain.parquet", **options)
    file = EncryptedFile(MODULE_PATH, policies.DATA_KEYS_FOOTER_KEY, tmp_path / "file.parquet")
    keytools(file.policy).encrypt_file(tmp_path / "plain.parquet", file.path)
    if readable:
        assert DuckDb().read(file).to_pylist() == table.to_pylist()
        return
    with pytest.raises(duckdb.Error):
        DuckDb().read(file)
