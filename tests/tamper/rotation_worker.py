"""Processes that rotate, read or write a data set repeatedly, until they are told to stop.

    python rotation_worker.py FOLDER KEYSTORE ACTION ...

forks once for each action, after all imports. Each process prints a line when it begins, and leaves a file of
JSON beside the keystore: how many times it acted, and what went wrong.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import opentelemetry.metrics
import opentelemetry.trace  # noqa: F401
import pyarrow as pa
from rotation_case import TABLE, Case, passphrase, read_with_pyarrow

import parquet_keytools.tables.reading
import parquet_keytools.tables.writing  # noqa: F401
from parquet_keytools.kms.keystore_file import KeystoreKms

STOP = "stop"
SETTINGS: dict[str, dict[str, Any]] = {
    "internal": {"key_material": "internal"},
    "plaintext_footer": {"key_material": "internal", "plaintext_footer": True},
    "external": {"key_material": "external"},
}
"""Beginning of a file's name -> settings of its table."""


class Worker:
    """Does one thing to a data set.

    Args:
        folder: The data set.
        keystore: Its KMS.
    """

    def __init__(self, folder: Path, keystore: Path) -> None:
        self._folder = folder
        self._case = Case(folder, KeystoreKms(keystore, passphrase), None)
        self._tools = self._case.tools()
        self._round = 0
        self._files = sorted(path for path in folder.rglob("*.parquet"))

    def rotate(self) -> str | None:
        """Rotate what is not current."""
        return self._rotate()

    def rotate_all(self) -> str | None:
        """Rotate everything, so that there is always work to do."""
        return self._rotate(older_than="1000000")

    def _rotate(self, **options: Any) -> str | None:
        report = self._tools.rotate(self._folder, **options)
        return None if report.succeeded else str([file.error for file in report.failures] or report.stopped_by)

    def read(self) -> str | None:
        """Read each file and the data set, with ours and with pyarrow's CryptoFactory."""
        self._round += 1
        # With cached keys and without, in turns.
        tools = self._tools if self._round % 2 else self._case.tools()
        for path in self._files:
            if not tools.read_table(path).equals(TABLE):
                return f"{path}: other values"
            if not read_with_pyarrow(self._case.kms, path).equals(TABLE):
                return f"{path}: other values, as pyarrow reads it"
        rows = tools.dataset(self._folder).to_table(columns=["a", "b"]).num_rows
        return None if rows == len(self._files) * TABLE.num_rows else f"{rows} rows"

    def read_any(self) -> str | None:
        """Read each file and the folder, in whatever state the last writer left them."""
        for path in self._files:
            table = self._tools.read_table(path)
            if table.num_rows not in (2, TABLE.num_rows):
                return f"{path}: {table.num_rows} rows"
            self._tools.dataset(path)
        return None

    def write(self) -> str | None:
        """Rewrite each file, and check that no process restores the old file."""
        self._round += 1
        for position, path in enumerate(self._files):
            table = pa.table({"a": [self._round, position], "b": ["x", "y"]})
            settings = SETTINGS[path.name.split("-")[0]]
            tools = self._case.tools(column_keys={"ka": ["a"], "kb": ["b"]}, **settings)
            tools.write_table(table, path)
            if not self._tools.read_table(path).equals(table):
                return f"{path}: round {self._round} is lost"
        return None


def work(action: str, folder: Path, keystore: Path, answer: Path) -> None:
    """Repeat the action until the file STOP exists beside the keystore."""
    worker = Worker(folder, keystore)
    act: Callable[[], str | None] = getattr(worker, action)
    rounds, failure = 0, None
    stop = keystore.with_name(STOP)
    os.write(1, b"ready\n")
    while failure is None and not stop.exists():
        try:
            failure = act()
        except Exception:
            failure = traceback.format_exc()
        rounds += 1
    answer.write_text(json.dumps({"action": action, "rounds": rounds, "failure": failure}))


def main(folder: Path, keystore: Path, actions: list[str]) -> None:
    """Fork for each action, and wait for the end of all."""
    gc.freeze()
    children = []
    for number, action in enumerate(actions):
        child = os.fork()
        if child == 0:
            work(action, folder, keystore, answer_of(keystore, number))
            return
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(children)


def answer_of(keystore: Path, number: int) -> Path:
    """Return the file for a process's report."""
    return keystore.with_name(f"answer-{number}.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
