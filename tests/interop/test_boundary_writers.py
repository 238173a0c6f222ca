"""Other readers accept a file under another file's prefix, as docs/aad-prefix-boundary.md says."""

from __future__ import annotations

import base64
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
from prefix_files import aad_fields, data, present

if TYPE_CHECKING:
    from engines.spark import Spark

KEY = b"0123456789012345"
PREFIX = "employees_23May2018.part"


def moved(folder: Path) -> Path:
    """Return part10 of the specification's example (4.4.1), passed off as part1."""
    properties = pe.create_encryption_properties(KEY, aad_prefix=f"{PREFIX}10".encode(), store_aad_prefix=False)
    pq.write_table(data(1000), folder / "part10.parquet", encryption_properties=properties)
    path = folder / "part1.parquet"
    shutil.copy(folder / "part10.parquet", path)
    _, unique, _ = aad_fields(path)
    assert unique is not None and len(unique) == 8
    present(path, None, b"0" + unique, supply=True)
    return path


def test_spark_reads_part10_as_part1(spark: Spark, tmp_path: Path) -> None:
    options = {
        "parquet.crypto.factory.class": "InteropKeys$DataKeys",
        "interop.footer.key": f"footer:{base64.b64encode(KEY).decode()}",
        "interop.column.keys": "",
        "interop.aad.prefix": f"{PREFIX}1",
    }
    assert spark.read_with(moved(tmp_path), options).cast(data().schema).equals(data(1000))


def test_polars_reads_part10_as_part1(tmp_path: Path) -> None:
    decryption = pl.ParquetDecryptionProperties(footer_key=KEY, aad_prefix=f"{PREFIX}1".encode())
    assert (
        pl.read_parquet(moved(tmp_path), decryption=decryption).to_arrow().cast(data().schema).equals(data(1000))
    )
