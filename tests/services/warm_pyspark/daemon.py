"""PySpark's daemon, which forks Python workers after importing what our workers import: most of their time."""

from __future__ import annotations

import gc

import pyarrow.dataset  # noqa: F401
from pyspark.daemon import manager

import parquet_keytools.keytools
import parquet_keytools.spark.map_files
import parquet_keytools.spark.pipelines  # noqa: F401

if __name__ == "__main__":
    # Otherwise, the garbage collector of each worker would copy the memory that it visits.
    gc.freeze()
    manager()
