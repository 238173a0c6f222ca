"""Commits to an encrypted Iceberg table, each in its own process, which SIGKILL ends at one step.

It reads one order per line from stdin, and forks for each: no thread was started before.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

# What operations import is imported before the forks.
import opentelemetry.metrics
import opentelemetry.trace  # noqa: F401
import pyarrow as pa
import rich.table  # noqa: F401
import sqlalchemy.dialects.sqlite
import sqlalchemy.orm
from iceberg_case import CANARY, Killed, Lake, rows, storage_that

import parquet_keytools.kms.in_memory  # noqa: F401
from parquet_keytools.iceberg import create_table

FIRST, COUNT = 100, 5


def append(lake: Lake) -> None:
    lake.load().append(rows(FIRST, FIRST + COUNT))


def overwrite(lake: Lake) -> None:
    lake.load().overwrite(rows(FIRST, FIRST + COUNT), "id in (0, 1)")


def several(lake: Lake) -> None:
    with lake.load().transaction() as transaction:
        transaction.append(rows(FIRST, FIRST + 2))
        transaction.append(rows(FIRST + 2, FIRST + COUNT))


def rotate(lake: Lake) -> None:
    lake.load().rotate()


def create(lake: Lake) -> None:
    table = pa.table({"id": [1], "name": [CANARY]})
    create_table(lake.catalog(), "db.another", table.schema, encryption_key="pii").append(table)


OPERATIONS = {function.__name__: function for function in (append, overwrite, several, rotate, create)}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def steps_that(point: int) -> Iterator[list[str]]:
    """Kill this process at a step of storage or of the catalog; half of a write is done before."""

    def act(number: int, name: str) -> None:
        if number == point and name.startswith("write"):
            raise Killed
        if number >= point:
            die()

    commit = sqlalchemy.orm.Session.commit
    with storage_that(act) as steps:

        def step(name: str) -> None:
            steps.append(name)
            act(len(steps) - 1, name)

        def committing(self: Any) -> None:
            changes = bool(self.in_transaction())
            if changes:
                step("before the commit")
            commit(self)
            if changes:
                step("after the commit")

        with mock.patch.object(sqlalchemy.orm.Session, "commit", committing):
            yield steps


def run(order: dict[str, Any]) -> None:
    """Do an operation, and be killed at a step; without a step, write the operation's steps to a file."""
    lake = Lake(Path(order["folder"]))
    with steps_that(order["point"]) as steps:
        try:
            OPERATIONS[order["operation"]](lake)
        except Killed:
            die()
    Path(order["steps"]).write_text(json.dumps(steps))


def main() -> None:
    # Otherwise, the garbage collector of each child would copy the memory that it visits.
    gc.freeze()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            status = 1
            try:
                run(json.loads(line))
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        _, waited = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(waited), flush=True)


if __name__ == "__main__":
    main()
