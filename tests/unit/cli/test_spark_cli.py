"""`parquet-keytools spark`, as far as it goes without Spark."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from parquet_keytools.cli import app

COMMANDS = {
    "encrypt": ["source", "target"],
    "rotate": ["path"],
    "rekey": ["path"],
    "verify": ["path"],
    "keys": ["path"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_without_java_it_says_what_to_install(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["spark", command, *COMMANDS[command], "--config", "none.yaml"])
    assert result.exit_code == 2
    assert "there is no Java" in result.stderr and "openjdk-17-jre-headless" in result.stderr


def test_without_pyspark_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    result = CliRunner().invoke(app, ["spark", "keys", "path", "--config", "none.yaml"])
    assert result.exit_code == 2
    assert "pip install 'parquet-keytools[spark]'" in result.stderr


def test_settings_of_spark_have_a_form() -> None:
    result = CliRunner().invoke(app, ["spark", "keys", "path", "--config", "c", "--conf", "spark.executor.cores"])
    assert result.exit_code == 2
    assert "NAME=VALUE" in result.stderr
