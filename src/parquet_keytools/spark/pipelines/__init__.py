"""Pipelines over whole data sets as jobs of Spark; each file is done by the module encryptor, in a task of Python.

Each takes a session and returns a report, whose `files` is a DataFrame with a row for each file.
"""

from parquet_keytools.spark.pipelines.encryption import encrypt
from parquet_keytools.spark.pipelines.file_tables import PipelineReport
from parquet_keytools.spark.pipelines.inspection import VerificationReport, keys, verify
from parquet_keytools.spark.pipelines.rotation import rekey, rotate

__all__ = ["PipelineReport", "VerificationReport", "encrypt", "keys", "rekey", "rotate", "verify"]
