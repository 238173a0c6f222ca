"""Pipelines over whole data sets as jobs of Spark; each file is done by the module encryptor, in a task of Python.

Each takes a session and returns a report, whose `files` is a DataFrame with a row for each file.
"""

from parquet_keytools.spark.pipelines.encryption import encrypt
from parquet_keytools.spark.pipelines.inventory import keys
from parquet_keytools.spark.pipelines.report import PipelineReport
from parquet_keytools.spark.pipelines.rotation import rekey, rotate
from parquet_keytools.spark.pipelines.verification import VerificationReport, verify

__all__ = ["PipelineReport", "VerificationReport", "encrypt", "keys", "rekey", "rotate", "verify"]
