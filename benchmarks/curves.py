"""How does time grow with columns and row groups, with files, with bytes? Ours and pyarrow's, with slopes.

    python benchmarks/curves.py [chunks] [files] [bytes] [--largest 10000] [--cpu] [--folder DIR]
        [--json FILE]

Each point is measured in a separate process, which also reports its peak memory. The slope is the slope
between the last two points on logarithmic axes: 1 is proportional, 0 is constant. We count the KMS calls.
With `--json`, the curves are written to the file in the form of `benchmarks/figures.json`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pyarrow.dataset as ds
import pyarrow.parquet as pq
from arrow_overhead import MASTER_KEYS, keytools_for
from generated_files import write_generated
from metadata import Pyarrow, wide_table
from metadata import seconds as seconds_of

from parquet_keytools import Keytools
from parquet_keytools.kms.in_memory import InMemoryKms

# The same in each process.
MASTER_KEYS.update({name: name.ljust(16).encode() for name in MASTER_KEYS})

SHAPES = {
    "chunks": [(10, 10), (100, 10), (1_000, 10), (1_000, 50)],
    "files": [10, 100, 1_000, 10_000, 100_000],
    "bytes": [1, 10, 100, 1_000, 5_000],
}
"""Columns and row groups; files; megabytes."""

WORK = {
    "chunks": ["read a column", "encrypt a file"],
    "files": ["open and read a file", "open and read all"],
    "bytes": ["read a file", "encrypt a file"],
}

TITLES = {
    "chunks": "One file: seconds over the number of column chunks",
    "files": "A data set: seconds over the number of files",
    "bytes": "One file: seconds over its size",
}
AXES = {"chunks": "columns x row groups", "files": "files of 20 columns", "bytes": "megabytes"}


def size_of(curve: str, shape: Any) -> int:
    """Return the position of a point on its axis."""
    return shape[0] * shape[1] if curve == "chunks" else int(shape)


def prepare(curve: str, shape: Any, folder: Path) -> None:
    """Write the files of a point."""
    plain = folder / "plain.parquet"
    if curve == "chunks":
        pq.write_table(wide_table(shape[0], shape[1] * 10), plain, row_group_size=10)
    elif curve == "bytes":
        write_generated(plain, shape)
    else:
        pq.write_table(wide_table(20, 100), plain)
    table = pq.read_table(plain)
    with keytools_for(table.column_names) as keytools:
        keytools.encrypt_file(plain, folder / "ours.parquet")
    Pyarrow(table.column_names).write(table, folder / "pyarrow.parquet", 10 if curve == "chunks" else None)
    if curve == "files":
        # Links: the files of a data set differ only in name, and take no space. A file may have 65,000 of them.
        for side in ("ours", "pyarrow"):
            for number in range(shape):
                part = folder / side / f"part={number}"
                part.mkdir(parents=True)
                if number % 10_000 == 0:
                    first = part / "data.parquet"
                    if side == "ours":
                        # Written again: files with the same keys that are not one file are refused.
                        with keytools_for(table.column_names) as keytools:
                            keytools.encrypt_file(plain, first)
                    else:
                        shutil.copyfile(folder / "pyarrow.parquet", first)
                else:
                    os.link(first, part / "data.parquet")


def ours(curve: str, work: str, folder: Path, keytools: Keytools) -> Callable[[], object]:
    """Return our figures."""
    if work == "encrypt a file":
        return lambda: keytools.encrypt_file(folder / "plain.parquet", folder / "target.parquet")
    if curve == "files":
        one = ds.field("part") == 7
        return lambda: keytools.dataset(folder / "ours").to_table(filter=one if work.endswith("a file") else None)
    return lambda: keytools.read_table(
        folder / "ours.parquet", columns=["column_1"] if curve == "chunks" else None
    )


def theirs(curve: str, work: str, folder: Path, pyarrow: Pyarrow) -> Callable[[], object]:
    """Return the same with pyarrow and its CryptoFactory."""
    if work == "encrypt a file":
        rows = 10 if curve == "chunks" else None
        return lambda: pyarrow.write(pq.read_table(folder / "plain.parquet"), folder / "target.parquet", rows)
    if curve == "files":
        one = ds.field("part") == 7
        return lambda: pyarrow.dataset(folder / "pyarrow").to_table(
            filter=one if work.endswith("a file") else None
        )
    columns = ["column_1"] if curve == "chunks" else None
    return lambda: pq.read_table(
        folder / "pyarrow.parquet", columns=columns, decryption_properties=pyarrow.properties()
    )


def measure_here(curve: str, work: str, side: str, folder: Path, clock: Callable[[], float]) -> dict[str, float]:
    """Measure a point in this process, which has done no other work."""
    names = list(pq.read_schema(folder / "plain.parquet").names)
    with keytools_for(names) as keytools:
        call = (
            ours(curve, work, folder, keytools) if side == "ours" else theirs(curve, work, folder, Pyarrow(names))
        )
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = peak_megabytes()
        seconds = seconds_of(call, clock)
        peak = peak_megabytes() - before
        calls = sum(cast(InMemoryKms, keytools.kms).call_counts.values())
        if seconds < 1:
            # Without imports at the first use.
            seconds = seconds_of(call, clock)
    return {"seconds": seconds, "megabytes": peak, "kms_calls": calls}


def peak_megabytes() -> float:
    """Return the peak memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1000


def measure(curve: str, work: str, side: str, folder: Path, *, cpu: bool) -> dict[str, float]:
    """Measure a point in a separate process."""
    command = [sys.executable, __file__, "--point", curve, work, side, str(folder), *(["--cpu"] if cpu else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    (folder / "target.parquet").unlink(missing_ok=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def slope(points: list[tuple[int, float]]) -> float:
    """Return the slope between the last two points on logarithmic axes."""
    (x0, y0), (x1, y1) = points[-2:]
    return math.log(y1 / y0) / math.log(x1 / x0)


def run(curve: str, largest: int | None, *, cpu: bool) -> dict[str, Any]:
    """Measure a curve, and print it."""
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for shape in SHAPES[curve]:
        size = size_of(curve, shape)
        if largest is not None and size > largest:
            break
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            prepare(curve, shape, folder)
            for work in WORK[curve]:
                for side in ("ours", "pyarrow"):
                    found = measure(curve, work, side, folder, cpu=cpu)
                    lines.setdefault((work, side), []).append((size, found["seconds"]))
                    print(
                        f"{size:>9,} {curve:7} {work:21} {side:8} {found['seconds']:9.3f} s"
                        f" {found['megabytes']:9.0f} MB {found['kms_calls']:4.0f} KMS calls",
                        flush=True,
                    )
    for (work, side), points in lines.items():
        if len(points) > 1:
            print(f"slope of {work}, {side}: {slope(points):.2f}")
    return {
        "title": TITLES[curve].replace("seconds", "seconds of the processor") if cpu else TITLES[curve],
        "axis": AXES[curve],
        "lines": [
            {"label": f"{work}, {side}", "dashed": side == "pyarrow", "points": points}
            for (work, side), points in lines.items()
        ],
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", nargs="*", help="chunks, files, bytes; all if none is given")
    parser.add_argument("--largest", type=int, default=None, help="leave out larger points")
    parser.add_argument("--folder", type=Path, default=None, help="where files go meanwhile")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--cpu", action="store_true", help="time of the processor: for a machine that others use")
    parser.add_argument("--point", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.point:
        curve, work, side, place = arguments.point
        clock = time.process_time if arguments.cpu else time.perf_counter
        print(json.dumps(measure_here(curve, work, side, Path(place), clock)), flush=True)
        # pyarrow's threads may still hold Python objects, and abort the process when it ends.
        os._exit(0)
    if arguments.folder is not None:
        tempfile.tempdir = str(arguments.folder)
    document = {
        f"curve-{curve}": run(curve, arguments.largest, cpu=arguments.cpu) for curve in arguments.curves or SHAPES
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
