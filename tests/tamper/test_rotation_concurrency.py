"""Many processes on one data set: rotations, readers and writers. ROTATION_SECONDS sets for how long.

The default is long enough for several rounds of each, and a minute in a soak.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rotation_case import TABLE, Case, materials, names
from rotation_worker import SETTINGS, STOP, answer_of
from soak import SOAK

SECONDS = float(os.environ.get("ROTATION_SECONDS", "60" if SOAK else "1"))
TESTS = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.timeout(240 + 3 * SECONDS)


def make(tmp_path: Path, count: int) -> Case:
    case = Case.make(tmp_path, "keystore")
    for kind, settings in SETTINGS.items():
        for number in range(count):
            case.write(f"p={number % 2}/{kind}-{number}.parquet", tools=case.tools(**settings))
    return case


def run(case: Case, actions: list[str], meanwhile: Callable[[], object]) -> list[dict[str, object]]:
    """Run a process for each action, for some time; return their reports."""
    keystore = case.folder.parent / "keystore.json"
    program = Path(__file__).with_name("rotation_worker.py")
    path = os.pathsep.join([str(TESTS), *sys.path])
    # Many processes with as many threads as processors would only wait for one another.
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, program, case.folder, keystore, *actions],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        for _ in actions:
            assert process.stdout.readline() == "ready\n"
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            meanwhile()
            time.sleep(min(0.5, SECONDS / 8))
        keystore.with_name(STOP).touch()
        assert process.wait(200) == 0
        return [json.loads(answer_of(keystore, number).read_text()) for number in range(len(actions))]
    finally:
        if process.poll() is None:
            # Its children, too.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()


def test_many_rotate_and_read(tmp_path: Path) -> None:
    case = make(tmp_path, 2)
    before = names(case.folder)
    versions = 1

    def add_version() -> None:
        nonlocal versions
        if versions < 40:
            case.add_version()
            versions += 1

    each = 4 if SOAK else 2
    answers = run(case, ["rotate"] * each + ["rotate_all"] * each + ["read"] * each, add_version)
    print(f"\n{versions} versions; {[(answer['action'], answer['rounds']) for answer in answers]}")
    assert [answer["failure"] for answer in answers if answer["failure"] is not None] == []
    assert all(int(str(answer["rounds"])) >= 1 for answer in answers)
    # The last one may have begun before the last version existed.
    assert case.tools().rotate(case.folder).succeeded
    newest = {str(versions)}
    for path in case.folder.rglob("*.parquet"):
        used = {
            case.kms.wrapped_key_version(material.kms_wrapped_key, material.master_key_id)
            for material in materials(case.tools(), path)
        }
        assert used == newest, path
    for version in range(1, versions):
        case.disable(version)
    for path in case.folder.rglob("*.parquet"):
        assert case.tools().read_table(path).equals(TABLE)
    assert names(case.folder) == before


def test_rotations_readers_and_a_writer(tmp_path: Path) -> None:
    """A new file is never replaced by an older state with newer keys."""
    case = make(tmp_path, 1)
    before = names(case.folder)
    rotating, reading = (3, 2) if SOAK else (2, 1)
    answers = run(case, ["rotate_all"] * rotating + ["write"] + ["read_any"] * reading, lambda: None)
    print(f"\n{[(answer['action'], answer['rounds']) for answer in answers]}")
    assert [answer["failure"] for answer in answers if answer["failure"] is not None] == []
    assert names(case.folder) == before
