"""A refused write leaves the data unchanged: Spark deletes it before the first task of a write starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port
from spark_cluster import PASSPHRASE, VARIABLE
from spark_driver import SparkDriver
from spark_overwrites import AGAIN, CHANGED, REFUSED, WRITTEN

from parquet_keytools.kms.keystore_file import Keystore
from parquet_keytools.kms.passphrase import passphrase_from_text

pytestmark = [
    pytest.mark.usefixtures("java"),
    pytest.mark.skipif(os.environ.get("SPARK") == "no", reason="SPARK=no leaves the tests with Spark out"),
    pytest.mark.timeout(900),
]

YAML = f"""
version: 1
kms: {{type: keystore, path: keystore.json, passphrase: "${{{VARIABLE}}}"}}
tables:
  few: {{footer_key: footer, column_keys: {{pii: ["*name"]}}, unlisted_columns: footer_key}}
  readable: {{footer_key: footer, column_keys: {{pii: [name]}}, unlisted_columns: plaintext}}
  locked: {{footer_key: footer, column_keys: {{locked: [name]}}, unlisted_columns: footer_key}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configurations that differ in one table, and a disabled master key."""
    folder = tmp_path_factory.mktemp("spark-overwrites")
    keystore = Keystore.create(folder / "keystore.json", lambda: passphrase_from_text(PASSPHRASE), scrypt_n=2**14)
    for name in ("footer", "pii", "locked"):
        keystore.create_key(name)
    keystore.set_enabled("locked", enabled=False)
    (folder / "c.yaml").write_text(YAML)
    changed = YAML.replace("unlisted_columns", "data_key_length_bits: 256, unlisted_columns", 1)
    (folder / "changed.yaml").write_text(changed)
    for name in ("data", "local", "ways"):
        (folder / name).mkdir()
    return folder


def job(driver: SparkDriver, folder: Path, *names: str, yaml: str = "c.yaml", **more: Any) -> dict[str, Any]:
    job = {"kind": "overwrites", "folder": folder, "yaml": yaml, "port": free_port()}
    found: dict[str, Any] = driver.do(**job, attempts=names, **more)
    return found


@pytest.fixture(scope="module")
def results(folder: Path, spark_driver: SparkDriver) -> dict[str, Any]:
    """The results of all attempts; some in a session whose configuration changed meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, PASSPHRASE)
        found = job(spark_driver, folder, *REFUSED, *WRITTEN, prepare=True)
        found |= job(spark_driver, folder, *CHANGED, *AGAIN, yaml="changed.yaml")
    return found


@pytest.mark.parametrize("name", [*REFUSED, *CHANGED])
def test_a_refused_write_leaves_the_data_as_it_was(results: Mapping[str, Any], name: str) -> None:
    _, text = (REFUSED | CHANGED)[name]
    assert text in results[name]["error"]
    assert results[name]["changed"] == []


@pytest.mark.parametrize("name", [*WRITTEN, *AGAIN])
def test_a_write_as_its_table_says_is_not_refused(results: Mapping[str, Any], name: str) -> None:
    assert results[name]["error"] == ""
    assert bool(results[name]["changed"]) is (name not in {"EXPLAIN", "nothing to be written"})


def test_what_was_written_is_encrypted(folder: Path, results: Mapping[str, Any]) -> None:
    written = [*(folder / "data").rglob("*.parquet"), *(folder / "warehouse").rglob("part-*")]
    written = [path for path in written if "plain" not in path.parts]
    assert len(written) > 8
    assert {path.read_bytes()[-4:] for path in written} == {b"PARE"}
