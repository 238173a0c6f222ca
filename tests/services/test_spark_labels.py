"""Labels in the metadata of Spark's columns determine the keys of files that Spark writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from spark_driver import SparkDriver

from parquet_keytools import Keytools

pytestmark = [
    pytest.mark.usefixtures("java"),
    pytest.mark.skipif(os.environ.get("SPARK") == "no", reason="SPARK=no leaves the tests with Spark out"),
    pytest.mark.timeout(600),
]

YAML = """
version: 1
kms: {type: in_memory, keys: {footer: AAECAwQFBgcICQoLDA0ODw==, pii: AAECAwQFBgcICQoLDA0OAQ==,
  pci: AAECAwQFBgcICQoLDA0OAg==}}
classes: {pii: {key: pii}, payment: {key: pci}, public: plaintext}
tables:
  t: {footer_key: footer, labels_from: [arrow: {}], unlabelled: public}
"""


def test_spark_writes_under_the_keys_of_labels(tmp_path: Path, spark_driver: SparkDriver) -> None:
    config = tmp_path / "c.yaml"
    config.touch(mode=0o600)
    config.write_text(YAML)
    target = tmp_path / "written"
    found = spark_driver.do(kind="labels", config=config, target=target, labels={"email": "pii"})
    assert found["rows"] == ["a@b"]
    # The column has a label now, and the options leave it in plaintext.
    assert "The options of this write were made by another configuration" in found["later"]
    with Keytools.from_yaml(config) as tools:
        (keys,) = [keys_of(tools, path) for path in target.glob("*.parquet")]
    assert keys == {"id": None, "email": "pii", "name": None, "orders.list.element.iban": "pci"}


def keys_of(tools: Keytools, path: Path) -> dict[str, str | None]:
    return {column.path: column.key and column.key.name for column in tools.inspect_file(path).columns}
