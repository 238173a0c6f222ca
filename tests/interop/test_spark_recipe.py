"""docs/recipes/migrate-from-spark.md: Spark writes the files, and the blocks of the page migrate them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from engines.ours import base64_keys
from recipe_pages import blocks, run_blocks

from parquet_keytools import Keytools

if TYPE_CHECKING:
    from engines.spark import Spark

PAGE = "migrate-from-spark"


def test_the_files_of_spark_move_to_the_new_kms(spark: Spark, tmp_path: Path) -> None:
    keys = base64_keys({"old_footer": os.urandom(16), "old_pii": os.urandom(16)})
    (tmp_path / "old-master-keys.json").write_text(json.dumps(keys))
    (properties,) = [text for language, text in blocks(PAGE) if language == "properties"]
    options = dict(line.split("=", 1) for line in properties.splitlines())
    # It wraps as parquet-java's InMemoryKMS does.
    options["parquet.encryption.kms.client.class"] = "InteropKeys$Kms"
    # Spark caches clients by this token, and other tests of this JVM have other keys.
    options["parquet.encryption.key.access.token"] = "recipe"
    options["interop.master.keys"] = ",".join(f"{name}:{key}" for name, key in keys.items())
    rows = [(1545, "N14228"), (1714, "N24211"), (1141, "N619AA"), (725, "N804JB")]
    frame = spark.session.createDataFrame(rows, "flight int, tailnum string")
    frame.repartition(2).write.options(**options).parquet(str(tmp_path / "flights"))
    files = sorted((tmp_path / "flights").glob("*.parquet"))
    assert {path.read_bytes()[:4] for path in files} == {b"PARE"}
    run_blocks(PAGE, tmp_path)
    with Keytools.from_yaml(tmp_path / "new.yaml") as keytools:
        table = keytools.read_table(tmp_path / "flights")
    assert sorted(zip(*table.to_pydict().values(), strict=True)) == sorted(rows)
