"""Rows removed from a file that Spark wrote, with 96-bit timestamps: Spark reads the other rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest
from engines import policy as policies
from engines.ours import MODULE_PATH, keytools
from engines.policy import EncryptedFile, Policy

if TYPE_CHECKING:
    from engines.spark import Spark

ROWS = """
    select id, concat('u', id) name, timestamp_seconds(1700000000 + id) at,
        timestamp_ntz'2026-01-01 00:00:00' local,
        cast(id as decimal(9, 2)) price, cast(id as decimal(30, 5)) total,
        array(id, id + 1) list, map('k', id) map, struct(id as x, array('a') as y) nested,
        date_add(date'2026-01-01', cast(id as int)) day
    from (select id from range(1000))
"""


@pytest.mark.parametrize("policy", [policies.FOOTER_KEY, Policy("e", column_keys=False, key_material="external")])
def test_spark_reads_what_is_left(spark: Spark, tmp_path: Path, policy: Policy) -> None:
    frame = spark.session.sql(ROWS)
    name = "spark.sql.parquet.outputTimestampType"
    before = str(spark.session.conf.get(name))
    spark.session.conf.set(name, "INT96")
    try:
        plain = spark.write_frame(frame, tmp_path / "plain", {})
    finally:
        spark.session.conf.set(name, str(before))
    types = {column.physical_type for column in pq.read_metadata(plain).schema}
    assert types >= {"INT96", "INT64", "INT32", "FIXED_LEN_BYTE_ARRAY"}
    path, tools = tmp_path / "x.parquet", keytools(policy)
    tools.encrypt_file(plain, path)
    was = tools.metadata(path)
    (file,) = tools.erase_rows(path, where="id >= 10 AND id < 990").files
    assert file.error is None and tools.metadata(path).schema.equals(was.schema)
    assert tools.metadata(path).metadata == was.metadata
    left = spark.read(EncryptedFile(MODULE_PATH, policy, path))
    assert left.to_pylist() == frame.where("id < 10 or id >= 990").toArrow().to_pylist()
