"""How long do commands take while the KMS is down? And what do `verify` and `report` need for very many KEKs?

    python benchmarks/kms_down.py [--files 300 2000] [--timeout 20] [--keys 1 10 100] [--many 5000]

Files are written with a real OpenBao server; each file has two KEKs of its own. Then the commands get a port that
refuses connections, and a server that accepts them and never answers. `--many` writes very many files, and counts
the server's requests; it takes minutes, and is left out by default.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from parquet_keytools import Keytools

TESTS = Path(__file__).parents[1] / "tests"
PROGRAM = [sys.executable, "-c", "from parquet_keytools.cli import main; main()"]
TABLE = pa.table({"id": range(100), "name": [f"name {number}" for number in range(100)]})
COMMANDS = ("encrypt", "decrypt", "rotate", "verify", "keys", "report")


@contextmanager
def openbao(folder: Path, master_keys: list[str], *, audit: bool = False) -> Iterator[tuple[str, str]]:
    """Run an OpenBao server with these keys; yields its URL and a token."""
    sys.path[:0] = [str(TESTS), str(TESTS / "services")]
    from openbao import OpenBao  # type: ignore[import-not-found]

    server = OpenBao(folder, in_memory=True, audit=audit)
    try:
        server.start()
        for name in master_keys:
            server.create_key(name)
        yield server.url, server.root_token
    finally:
        server.stop()


@contextmanager
def a_port(*, listens: bool) -> Iterator[str]:
    """Yield the URL of a port that refuses connections, or accepts them and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        if listens:
            yield url
    if not listens:
        yield url


def configuration(path: Path, url: str, token: str, master_keys: list[str], timeout_seconds: float) -> Path:
    """Write a configuration: the first master key is the footer's, the others are the columns'."""
    settings = {
        "version": 1,
        "kms": {"type": "vault", "url": url, "token": token, "timeout_seconds": timeout_seconds},
        "tables": {
            "people": {
                "footer_key": master_keys[0],
                # The columns of other keys do not exist.
                "column_keys": {name: ["name" if name == master_keys[1] else name] for name in master_keys[1:]},
                "unlisted_columns": "footer_key",
                "cache_lifetime_seconds": 0,
            }
        },
    }
    path.write_text(json.dumps(settings))
    path.chmod(0o600)
    return path


@dataclass(frozen=True)
class Run:
    """The result of a command."""

    seconds: float
    status: int
    megabytes: float
    lines: int


def run(*arguments: object) -> Run:
    """Run a command; memory is the peak of its largest process."""
    start = time.monotonic()
    with tempfile.TemporaryFile() as output:
        command = [*PROGRAM, *map(str, arguments)]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - start
        output.seek(0)
        lines = len(output.read().splitlines())
    return Run(seconds, process.returncode, used.ru_maxrss / 1024, lines)


def encrypted_files(folder: Path, config: Path, count: int) -> None:
    """Write small files, each with its own KEKs."""
    folder.mkdir()
    paths = [folder / f"{number:05}.parquet" for number in range(count)]
    with Keytools.from_yaml(config) as keytools, ThreadPoolExecutor(4) as pool:
        list(pool.map(partial(keytools.write_table, TABLE), paths))


def commands_while_it_is_down(commands: Sequence[str], counts: list[int], timeout_seconds: float) -> None:
    """Print how long each command takes."""
    print("| command | files | refused | status | lines | no answer | status | lines |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    keys = ["footer", "pii"]
    with tempfile.TemporaryDirectory() as name, a_port(listens=True) as silent, a_port(listens=False) as refused:
        base = Path(name)
        (base / "server").mkdir()
        configs = {
            url: configuration(base / f"{number}.json", url, "token", keys, timeout_seconds)
            for number, url in enumerate((refused, silent))
        }
        with openbao(base / "server", keys) as (url, token):
            config = configuration(base / "up", url, token, keys, 60)
            for count in counts:
                encrypted_files(
                    base / f"encrypted-{count}", configuration(base / "up", url, token, keys, 60), count
                )
        for count in counts:
            encrypted, plain = base / f"encrypted-{count}", base / f"plain-{count}"
            plain.mkdir()
            for number in range(count):
                pq.write_table(TABLE, plain / f"{number:05}.parquet")
            for command in commands:
                cells = []
                for config in configs.values():
                    target = base / "target"
                    paths = {"encrypt": [plain, target], "decrypt": [encrypted, target]}.get(command, [encrypted])
                    done = run(command, *paths, "--config", config)
                    cells.append(f"{done.seconds:.1f} s | {done.status} | {done.lines}")
                    shutil.rmtree(target, ignore_errors=True)
                print(f"| `{command}` | {count:,} | {' | '.join(cells)} |", flush=True)


def checks_while_it_is_down(counts: list[int]) -> None:
    """Print how long `check` takes, with the default timeouts."""
    print("\n| `check` with | refused | status | lines | no answer | status | lines |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name, a_port(listens=True) as silent, a_port(listens=False) as refused:
        for count in counts:
            keys = [f"key-{number}" for number in range(max(count, 2))]
            cells = []
            for url in (refused, silent):
                config = configuration(Path(name) / "check.json", url, "token", keys, 60)
                if count == 1:
                    document = json.loads(config.read_text())
                    document["tables"]["people"]["column_keys"] = {keys[0]: ["name"]}
                    config.write_text(json.dumps(document))
                done = run("check", config)
                cells.append(f"{done.seconds:.1f} s | {done.status} | {done.lines}")
            print(f"| {count} keys | {' | '.join(cells)} |", flush=True)


def very_many_files(count: int) -> None:
    """Print the time, memory and requests of `verify`, `keys` and `report` for files that share no KEK."""
    print(f"\n| {2 * count:,} KEKs in {count:,} files | seconds | MB | requests of the KMS |")
    print("| --- | --- | --- | --- |")
    keys = ["footer", "pii"]
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        (base / "server").mkdir()
        with openbao(base / "server", keys, audit=True) as (url, token):
            config = configuration(base / "up", url, token, keys, 60)
            encrypted_files(base / "encrypted", config, count)
            log = base / "server" / "audit"
            for command in ("verify", "keys", "report"):
                before = log.stat().st_size
                more = ["--as", f"owner={config}", "--html", base / "report.html"] if command == "report" else []
                done = run(command, base / "encrypted", "--config", config, *more)
                with log.open() as entries:
                    entries.seek(before)
                    requests = [
                        entry["request"]["path"]
                        for entry in map(json.loads, entries)
                        if entry["type"] == "request"
                    ]
                unwraps = sum("/decrypt/" in path for path in requests)
                what = f"{len(requests):,}, {unwraps:,} of them unwrap keys"
                print(f"| `{command}` | {done.seconds:.1f} | {done.megabytes:.0f} | {what} |", flush=True)


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, nargs="*", default=[300, 2000])
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=COMMANDS)
    parser.add_argument("--timeout", type=float, default=20.0, help="timeout_seconds of the configuration")
    parser.add_argument("--keys", type=int, nargs="*", default=[1, 10, 100])
    parser.add_argument("--many", type=int, default=0)
    arguments = parser.parse_args()
    print(
        f"Load of this machine: {', '.join(f'{load:.1f}' for load in os.getloadavg())}; {os.cpu_count()} cores.\n"
    )
    if arguments.files:
        commands_while_it_is_down(arguments.commands, arguments.files, arguments.timeout)
    if arguments.keys:
        checks_while_it_is_down(arguments.keys)
    if arguments.many:
        very_many_files(arguments.many)


if __name__ == "__main__":
    main()
