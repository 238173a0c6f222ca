"""What `parquet-keytools spark settings` prints is enough for spark-sql and a server of Spark Connect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest
from spark_cluster import PASSPHRASE, VARIABLE
from spark_jvm import JAVA_OPTIONS

from parquet_keytools import Keytools
from parquet_keytools.kms.keystore_file import Keystore
from parquet_keytools.kms.passphrase import passphrase_from_text

pytestmark = [
    pytest.mark.usefixtures("java"),
    pytest.mark.skipif(os.environ.get("SPARK") == "no", reason="SPARK=no leaves the tests with Spark out"),
    pytest.mark.timeout(600),
]

YAML = f"""
version: 1
kms: {{type: keystore, path: keystore.json, passphrase: "${{{VARIABLE}}}"}}
tables:
  people: {{footer_key: footer, column_keys: {{pii: ["*name"]}}, unlisted_columns: footer_key}}
  others: {{footer_key: footer, column_keys: {{pii: [x]}}, unlisted_columns: footer_key}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, PASSPHRASE)
    keystore = Keystore.create(
        tmp_path / "keystore.json", lambda: passphrase_from_text(PASSPHRASE), scrypt_n=2**14
    )
    for name in ("footer", "pii"):
        keystore.create_key(name)
    (tmp_path / "c.yaml").write_text(YAML)
    return tmp_path


def called(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Call the command in a process: it starts Spark to read SQL, and stops a running session."""
    command = [sys.executable, "-m", "parquet_keytools", "spark", "settings", "--config", "c.yaml"]
    environment = os.environ | {"SPARK_SUBMIT_OPTS": JAVA_OPTIONS}
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, cwd=folder, env=environment, timeout=400
    )


def settings(folder: Path, *arguments: str) -> str:
    done = called(folder, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_spark_sql_needs_no_python(folder: Path) -> None:
    """A table that gets new columns covered by the configuration keeps its options."""
    text = settings(folder, "--table", "people", "--ddl", "id BIGINT, name STRING, tags ARRAY<STRING>")
    properties = text.split("# For spark-defaults.conf")[1].split("\n\n")[0].partition("\n")[2]
    options = text.split("for a write:\n")[1].split("\n\n")[0]
    (folder / "spark.conf").write_text(
        f"{properties}\nspark.sql.warehouse.dir {folder / 'warehouse'}\nspark.local.dir {folder / 'local'}\n"
        f"spark.master local[1]\nspark.ui.enabled false\nspark.driver.extraJavaOptions {JAVA_OPTIONS}\n"
        "spark.driver.bindAddress 127.0.0.1\nspark.driver.host 127.0.0.1\n"
        "spark.sql.catalogImplementation in-memory\n"
    )
    (folder / "job.sql").write_text(
        f"CREATE TABLE people (id BIGINT, name STRING, tags ARRAY<STRING>) USING parquet {options};\n"
        "INSERT INTO people VALUES (1, 'Ada', array('x'));\n"
        "ALTER TABLE people ADD COLUMNS (surname STRING, city STRING);\n"
        "INSERT INTO people VALUES (2, 'Grace', array(), 'Hopper', 'Arlington');\n"
        "SELECT sum(id), max(surname) FROM people;\n"
    )
    spark_sql = Path(pyspark.__file__).parent / "bin" / "spark-sql"
    done = subprocess.run(
        [spark_sql, "--properties-file", "spark.conf", "-f", "job.sql"],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.splitlines()[-1].split("\t") == ["3", "Hopper"]
    files = list((folder / "warehouse" / "people").glob("*.parquet"))
    assert len(files) == 2 and {path.read_bytes()[:4] for path in files} == {b"PARE"}
    content = b"".join(path.read_bytes() for path in (folder / "warehouse").rglob("*") if path.is_file())
    assert not [value for value in (b"Ada", b"Grace", b"Hopper", b"Arlington") if value in content]
    # Each column is under the table's key.
    report = Keytools.from_yaml(folder / "c.yaml").verify_folder(
        folder / "warehouse" / "people", table_name="people"
    )
    assert report.conforms, report


def test_columns_that_spark_does_not_understand(folder: Path) -> None:
    result = called(folder, "--table", "people", "--ddl", "id BIGGER")
    assert result.returncode == 2
    assert "Spark does not understand it" in result.stderr and "at java" not in result.stderr
    assert result.stdout == ""


def test_nothing_secret_is_printed(folder: Path) -> None:
    text = settings(folder, "--json")
    assert set(json.loads(text)) == {"settings"} and PASSPHRASE not in text
