"""Spark with our factory and KMS bridge: one configuration for all files, with a table for each policy."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from engines import policy as policies
from engines.ours import base64_keys, keytools, table_settings
from engines.policy import EncryptedFile, Policy
from engines.sample import MASTER_KEYS
from parquet_keytools import Keytools
from parquet_keytools.spark import session_settings

if TYPE_CHECKING:
    from engines.spark import Spark

SPARK_BRIDGE = "ours (Spark)"

WRITABLE = (
    policies.COLUMN_KEYS,
    policies.FOOTER_KEY,
    policies.FLAT,
    policies.CTR,
    policies.SINGLE_256,
    policies.UNLISTED,
)
"""The policies that our options for Spark's writer do not refuse."""

TABLES = (*dict.fromkeys((*WRITABLE, *policies.ARROW_CAN, policies.PREFIX_STORED, policies.PREFIX_SUPPLIED)),)
"""The policies whose files it reads, each as a table."""


class SparkBridge:
    """Spark's own Parquet writer and reader, as `parquet_keytools.spark.configure` sets them up.

    spark: A session with our jar; other reads and writes in it use other factories.
        spark: Whose session has our jar; other reads and writes in it use other factories.
        folder: For the configuration, whose keys are in plaintext: executors get only its path.
    """

    def __init__(self, spark: Spark, folder: Path) -> None:
        self._spark = spark
        self._path = folder / "interop.yaml"

    @cached_property
    def _keytools(self) -> Keytools:
        document = {
            "version": 1,
            "kms": {"type": "in_memory", "keys": base64_keys(MASTER_KEYS)},
            "tables": {_table_name(policy): table_settings(policy) for policy in TABLES},
        }
        self._path.write_text(json.dumps(document))
        return Keytools.from_yaml(self._path)

    @cached_property
    def _options(self) -> dict[str, str]:
        """The session settings of `configure`, as options of a read or write."""
        settings = session_settings(self._keytools.configuration)
        start = "spark.hadoop."
        return {name.removeprefix(start): value for name, value in settings.items() if name.startswith(start)}

    def write(self, policy: Policy, folder: Path) -> Path:
        """Write the sample."""
        frame = self._spark.plain_frame(policy, folder)
        options = self._keytools.spark_options(_table_name(policy), frame.schema)
        return self._spark.write_frame(
            frame, folder / "spark", self._spark.layout_options(policy) | self._options | options
        )

    def read(self, file: EncryptedFile) -> pa.Table:
        """Read a file, as one of its policy's table."""
        if file.policy.data_keys:
            # Refused before Spark starts.
            session_settings(keytools(file.policy).configuration)
        options = self._keytools.spark_read_options(_table_name(file.policy))
        return self._spark.read_with(file.path, self._options | options)


def _table_name(policy: Policy) -> str:
    return f"sample_{TABLES.index(policy)}"
