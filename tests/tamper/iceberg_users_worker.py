"""Writers and readers of one encrypted Iceberg table, each a process; they are forked before any thread starts.

    python iceberg_users_worker.py FOLDER SECONDS TURNS WRITERS READERS

A writer continues until SECONDS are over and TURNS are done. Each logs to its own file in FOLDER/seen.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

# What writers and readers import is imported before the forks.
import opentelemetry.metrics
import opentelemetry.trace  # noqa: F401
import rich.table  # noqa: F401
import sqlalchemy.dialects.sqlite  # noqa: F401
from iceberg_case import Lake, rows
from pyiceberg.exceptions import CommitFailedException, ValidationException

import parquet_keytools.kms.in_memory  # noqa: F401

MILLION = 1_000_000


def write(lake: Lake, number: int, deadline: float, turns: int) -> dict[str, object]:
    """Append four rows each turn, delete one in a second commit, and record the commits."""
    log = lake.folder / "seen" / f"acknowledged-{number}"
    conflicts = commits = 0
    turn = 0
    while turn < turns or time.monotonic() < deadline:
        first = number * MILLION + turn * 10
        lake.load().append(rows(first, first + 4))
        commits += 1
        with log.open("a") as file:
            file.writelines(f"{first + n}\n" for n in range(3))
        while True:
            try:
                lake.load().delete(f"id = {first + 3}")
                commits += 1
                break
            except (ValidationException, CommitFailedException):
                # Another writer has changed the same file, or was first each time.
                conflicts += 1
        turn += 1
    return {"turns": turn, "commits": commits, "conflicts": conflicts}


def read(lake: Lake, number: int, deadline: float, turns: int) -> dict[str, object]:
    """Scan until all writers are done, and compare with the commits before."""
    scans = 0
    seen = lake.folder / "seen"
    while not (seen / "done").exists() or not scans:
        expected: set[int] = set()
        for log in seen.glob("acknowledged-*"):
            expected |= {int(line) for line in log.read_text().split("\n")[:-1]}
        found = lake.load().scan().to_arrow()["id"].to_pylist()
        if len(found) != len(set(found)) or expected - set(found):
            raise AssertionError(f"lost: {sorted(expected - set(found))[:5]}, {len(found)} rows")
        scans += 1
        # Writers need the processor more.
        time.sleep(0.2)
    return {"scans": scans}


def start(
    work: Callable[[Lake, int, float, int], dict[str, object]], lake: Lake, number: int, until: float, turns: int
) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        result = work(lake, number, until, turns)
        (lake.folder / "seen" / f"{work.__name__}-{number}.json").write_text(json.dumps(result))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def main(folder: str, seconds: float, turns: int, writers: int, readers: int) -> int:
    lake = Lake(Path(folder))
    (lake.folder / "seen").mkdir()
    gc.freeze()
    until = time.monotonic() + seconds
    writing = [start(write, lake, number, until, turns) for number in range(writers)]
    reading = [start(read, lake, number, until, turns) for number in range(readers)]
    failed = 0
    for child in writing:
        failed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
    (lake.folder / "seen" / "done").touch()
    for child in reading:
        failed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])))
