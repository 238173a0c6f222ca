"""PySpark's daemon, which forks Python workers, after the import of what ours import: most of their time."""

from __future__ import annotations

import gc

import pyarrow.dataset  # noqa: F401
from pyspark.daemon import manager

import parquet_keytools.keytools
import parquet_keytools.spark.map_files
import parquet_keytools.spark.pipelines  # noqa: F401

if __name__ == "__main__":
    # Else each worker copies all that its collector of garbage looks at.
    gc.freeze()
    manager()
