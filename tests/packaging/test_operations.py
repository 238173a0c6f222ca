"""docs/operations.md: its blocks work, and it names all metrics and all fields of the audit log."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from warm_python import WarmPython

from parquet_keytools import audit, telemetry
from parquet_keytools.kms.remote_client import RemoteKmsSettings

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| `([\w.]+)` \|", re.MULTILINE)


@pytest.mark.parametrize("text", [text for language, text in BLOCKS if language == "python"])
def test_python_blocks_run(text: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", text]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_audit_log_is_as_shown(tmp_path: Path, warm_python: WarmPython) -> None:
    (setup,) = [text for language, text in BLOCKS if "JsonFormatter" in text and language == "python"]
    writing = "import pyarrow as pa\nkeytools.write_table(pa.table({'name': ['x']}), 't.parquet')\n"
    subprocess.run([warm_python.python, "-c", setup + writing], cwd=tmp_path, check=True, timeout=60)
    lines = (tmp_path / "audit.jsonl").read_text(encoding="utf-8").splitlines()
    (shown,) = [json.loads(text) for language, text in BLOCKS if language == "json"]
    assert [list(json.loads(line)) for line in lines] == [list(shown)] * 2


def test_yaml_blocks_have_fields_that_there_are() -> None:
    own = {"type", "url", "token_file"}
    for language, text in BLOCKS:
        if language == "yaml":
            assert yaml.safe_load(text)["kms"].keys() <= own | RemoteKmsSettings.model_fields.keys()


def test_all_metrics_and_audit_fields_are_there() -> None:
    metrics = {f"{telemetry.NAME}.{name}" for name in (*telemetry.COUNTERS, *telemetry.HISTOGRAMS)}
    assert metrics | audit.KeyUse.__dataclass_fields__.keys() == {
        name for name in ROW.findall(PAGE) if not name.endswith("Error")
    }
