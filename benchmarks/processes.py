"""From which number of small files do worker processes pay?

    python benchmarks/processes.py [--files 2000] [--rounds 3] [--processes 2] [--folder DIR]

encrypts, verifies, decrypts, re-keys and rotates folders of files of 20 columns and 100 rows by the command line,
with one process and with several in turn. Prints medians of wall and CPU seconds, including
worker processes and the start of the command. `rotate` has one process.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_CONFIGURATION = """\
version: 1
kms: {type: in_memory, keys: {footer: AAAAAAAAAAAAAAAAAAAAAA==, pii: AQEBAQEBAQEBAQEBAQEBAQ==}}
tables:
  benchmark: {footer_key: footer, column_keys: {pii: [column_0, column_1, column_2, column_3, column_4]},
              unlisted_columns: plaintext}
"""
_PROGRAM = [sys.executable, "-c", "from parquet_keytools.cli import main; main()"]
_FOLDERS = 100


def write_files(folder: Path, files: int) -> None:
    """Write plaintext files of 27 kB into a hundred folders."""
    table = pa.table({f"column_{number}": np.random.default_rng(number).random(100) for number in range(20)})
    for number in range(files):
        path = folder / f"part={number % _FOLDERS}" / f"{number}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path)


def seconds(command: Sequence[object], environment: Mapping[str, str]) -> tuple[float, float]:
    """Return the wall and CPU seconds of a command."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([*_PROGRAM, *map(str, command)], check=True, stdout=subprocess.DEVNULL, env=environment)
    clock, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def one_round(folder: Path, config: Path, processes: int) -> dict[str, tuple[float, float]]:
    """Return the seconds of each command."""
    # An installed program is not compiled each time.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
    encrypted, other = folder / "encrypted", folder / "other"
    found = {}
    for command in (
        ["encrypt", folder / "plain", encrypted],
        ["verify", encrypted],
        ["decrypt", encrypted, other],
    ):
        found[str(command[0])] = seconds([*command, "--config", config, "--processes", processes], environment)
    shutil.rmtree(other)
    found["rekey"] = seconds(
        ["rekey", encrypted, other, "--config", config, "--processes", processes], environment
    )
    if processes == 1:
        found["rotate"] = seconds(["rotate", encrypted, "--config", config, "--new-keks"], environment)
    in_place = ["rekey", encrypted, "--in-place", "--config", config, "--processes", processes]
    found["rekey --in-place"] = seconds(in_place, environment)
    for path in (encrypted, other):
        shutil.rmtree(path)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        config = folder / "config.yaml"
        config.touch(mode=0o600)
        config.write_text(_CONFIGURATION)
        write_files(folder / "plain", arguments.files)
        rounds = [
            {processes: one_round(folder, config, processes) for processes in (1, arguments.processes)}
            for _ in range(arguments.rounds)
        ]
    print(
        f"{arguments.files:,} files, medians of {arguments.rounds} rounds, seconds by the clock (of the processor)"
    )
    print(f"{'command':18} {'1 process':>16} {f'{arguments.processes} processes':>16}")
    for command in rounds[0][1]:
        cells = [
            "{:.1f} ({:.1f})".format(
                *map(statistics.median, zip(*(found[command] for found in every), strict=True))
            )
            for every in ([found[processes] for found in rounds] for processes in (1, arguments.processes))
            if command in every[0]
        ]
        print(f"{command:18} " + " ".join(f"{cell:>16}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
