"""DuckDB, which takes one DEK for a whole file and knows no KMS."""

from __future__ import annotations

import base64
from pathlib import Path

import duckdb
import pyarrow as pa

from engines.ours import DATA_KEYS, deks_of
from engines.policy import EncryptedFile, Policy
from engines.sample import ROW_GROUP_ROWS, write_plain

ENCRYPTION = "ENCRYPTION_CONFIG {footer_key: 'k'}"


class DuckDb:
    """`COPY` and `read_parquet` of DuckDB."""

    def write(self, policy: Policy, folder: Path) -> Path:
        """Write the sample."""
        assert not policy.column_keys
        path = folder / "file.parquet"
        with _connection(DATA_KEYS["footer"]) as connection:
            connection.execute("SET force_mbedtls_unsafe = 'true'")  # Its safe writer is an extension to download.
            connection.execute(
                f"COPY (FROM read_parquet('{write_plain(folder / 'plain.parquet', policy)}')) TO '{path}' "
                f"(FORMAT parquet, ROW_GROUP_SIZE {ROW_GROUP_ROWS}, {ENCRYPTION})"
            )
        return path

    def read(self, file: EncryptedFile) -> pa.Table:
        """Read a file with the footer's DEK, the only key that DuckDB accepts."""
        with _connection(deks_of(file).footer) as connection:
            query = f"FROM read_parquet('{file.path}', encryption_config = {{footer_key: 'k'}})"
            return connection.sql(query).to_arrow_table()


def _connection(footer_dek: bytes) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    # DuckDB uses a text of 16, 24 or 32 characters as the key itself, including base64 of 16 bytes.
    key = footer_dek.decode() if footer_dek.isalnum() else base64.b64encode(footer_dek).decode()
    connection.execute(f"PRAGMA add_parquet_key('k', '{key}')")
    return connection
