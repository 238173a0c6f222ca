"""Whatever a KMS does, an operation ends with our error, never with a signal, and never hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kms_failure_worker as worker
import pytest
from faults import RESPONSE_SECRET

TESTS = Path(worker.__file__).parent.parent
SOURCES = Path(sys.modules["parquet_keytools"].__file__ or "").parent.parent
CASES = list({case.name: case for case in worker.cases()}.values())


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Run all cases once."""
    folder = tmp_path_factory.mktemp("kms failures")
    path = os.pathsep.join([str(SOURCES), str(TESTS), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, worker.__file__, str(folder)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    return json.loads((folder / "outcomes.json").read_text())


def outcome_of(outcomes: dict[str, dict[str, Any]], case: worker.Case) -> dict[str, Any]:
    outcome = outcomes[case.name]
    assert outcome["exit"] == 0, f"exit {outcome['exit']}\n{outcome['output']}"
    assert RESPONSE_SECRET not in outcome["output"] + outcome.get("text", ""), "a secret came out"
    assert "terminate called" not in outcome["output"]
    return outcome


def group(name: str) -> Any:
    found = [case for case in CASES if case.group == name]
    return pytest.mark.parametrize("case", found, ids=[case.name for case in found])


@group("writes")
def test_writing(outcomes: dict[str, dict[str, Any]], case: worker.Case) -> None:
    outcome = outcome_of(outcomes, case)
    if case.failure == "wrong_key":
        # A KMS that wraps another key is detected when that key is unwrapped: then no data is returned.
        assert "error" not in outcome and outcome["left"], outcome
        of_footer = "KeyMaterialError" if case.double else "DecryptionError"
        assert outcome["read"] == ("ColumnAccessDeniedError" if case.failing == "column" else of_footer), outcome
        return
    assert outcome.get("ours"), outcome
    assert outcome["left"] == [], "something was left of the output"


@group("reads")
def test_reading_what_is_refused(outcomes: dict[str, dict[str, Any]], case: worker.Case) -> None:
    outcome = outcome_of(outcomes, case)
    assert outcome.get("ours"), outcome
    assert outcome["error"] == "ColumnAccessDeniedError"


@group("footer")
def test_reading_without_the_footer_key(outcomes: dict[str, dict[str, Any]], case: worker.Case) -> None:
    outcome = outcome_of(outcomes, case)
    assert outcome.get("ours"), outcome


@group("others")
def test_other_columns_go_on(outcomes: dict[str, dict[str, Any]], case: worker.Case) -> None:
    """One refused key must not affect the rest of the table."""
    assert outcome_of(outcomes, case).get("result") == worker.ROWS, outcomes[case.name]
