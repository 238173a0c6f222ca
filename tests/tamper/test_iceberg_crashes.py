"""A process that commits to an encrypted Iceberg table is killed at each step: nothing is lost or in plaintext."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from iceberg_case import Lake, put_back, rows
from soak import sample

from parquet_keytools.iceberg.table_audit import TableAudit, TableReport, located_table

WORKER = Path(__file__).with_name("iceberg_crash_worker.py")
NO_POINT = 10**6
ADDED = list(range(100, 105))


class Worker:
    """The process that forks for each order."""

    def __init__(self, folder: Path) -> None:
        self.steps = folder / "steps.json"
        environment = {**os.environ, "PYTHONPATH": str(WORKER.parents[1])}
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, lake: Lake, operation: str, point: int = NO_POINT) -> int:
        """Return the exit code, negative for a signal."""
        assert self.process.stdin is not None and self.process.stdout is not None
        order: dict[str, Any] = {"folder": str(lake.folder), "operation": operation, "point": point}
        print(json.dumps({**order, "steps": str(self.steps)}), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = Worker(tmp_path_factory.mktemp("steps"))
    yield worker
    assert worker.process.stdin is not None
    worker.process.stdin.close()
    assert worker.process.wait() == 0


def verified(lake: Lake) -> TableReport:
    located = located_table(lake.load().metadata_location, lake.folder / "keytools.yaml")
    return TableAudit(located, with_data=True).run()


@pytest.mark.parametrize(
    ("operation", "step", "offset"),
    [("append", 5, 0), ("overwrite", 9, 1), ("several", 9, 2), ("rotate", 3, 0), ("create", 7, 4)],
)
def test_a_kill_at_each_step_loses_nothing_and_leaks_nothing(
    worker: Worker, tmp_path: Path, operation: str, step: int, offset: int
) -> None:
    begin, folder = tmp_path / "begin", tmp_path / "lake"
    folder.mkdir()
    lake = Lake(folder)
    lake.create().append(rows(0, 10))
    shutil.copytree(folder, begin)
    before = lake.ids()

    assert worker.run(lake, operation) == 0
    steps = json.loads(worker.steps.read_text())
    assert {"create .json", "write .json", "before the commit", "after the commit"} <= set(steps)
    after = lake.ids()
    assert (
        lake.outside_ids()
        == after
        == {
            "append": [*before, *ADDED],
            "overwrite": [*before[2:], *ADDED],
            "several": [*before, *ADDED],
        }.get(operation, before)
    )
    last_commit = max(n for n, name in enumerate(steps) if name == "after the commit")
    for point in sample(range(len(steps)), step, offset):
        put_back(begin, folder)
        files = lake.files()
        assert worker.run(lake, operation, point) == -signal.SIGKILL, steps[point]
        committed = point >= last_commit
        assert lake.ids() == (after if committed else before), steps[point]
        report = verified(lake)
        assert report.findings == []
        assert report.orphans is not None
        left = {f"file://{path}" for path in lake.files() - files}
        # A killed commit leaves files, and each of them is reported; a completed commit leaves none.
        assert set(report.orphans) == (set() if committed else left), steps[point]
        lake.assert_no_plaintext()
        lake.load().append(rows(200, 202))
        now = [*(after if committed else before), 200, 201]
        assert lake.ids() == lake.outside_ids_of(lake.load().metadata_location) == now
        if operation == "create":
            catalog = lake.catalog()
            found = lake.load("db.another").scan().to_arrow() if catalog.table_exists("db.another") else []
            assert len(found) == (1 if committed else 0)
