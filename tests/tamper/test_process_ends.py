"""Short programs end with their exit status, whatever Python objects Arrow's threads still hold.

Each is a process, since only the end of an interpreter shows it: alone, forked after all imports; and started
beside four times as many busy processes as there are cores.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from soak import SOAK, how_many, sample

from parquet_keytools import Keytools

YAML = """
version: 1
kms: {type: in_memory, keys: {kf: MDEyMzQ1Njc4OTAxMjM0NQ==, ka: MTIzNDU2Nzg5MDEyMzQ1MA==}}
tables: {t: {footer_key: kf, column_keys: {ka: [a]}, unlisted_columns: footer_key}}
"""
ROWS = 4_000_000 if SOAK else 500_000

IMPORTS = """
import os, signal, sys
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import parquet_keytools.tables.reading, parquet_keytools.tables.writing
from parquet_keytools import Keytools
"""
BEGIN = (
    IMPORTS
    + """
keytools = Keytools.from_yaml("keytools.yaml")
file, folder, damaged = (os.path.abspath(name) for name in ("data/0.parquet", "data", "damaged.parquet"))
options = {"config": "keytools.yaml"}
# That imports take long on a busy machine says nothing.
for busy in os.environ["BUSY_PROCESSES"].split():
    os.kill(int(busy), signal.SIGCONT)
"""
)
FORK = (
    IMPORTS
    + """
while __file__ := sys.stdin.readline().strip():
    child = os.fork()
    if not child:
        os.dup2(os.open(__file__ + ".stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        exec(compile(open(__file__).read(), __file__, "exec"))
        break  # It ends as any program.
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
)
"""Runs each program whose path it reads in a process of its own; it has started no thread."""

PROGRAMS = {
    "filesystem": "pq.read_table(file, filesystem=keytools.filesystem())",
    "arrow filesystem": "pq.read_table(file, filesystem=keytools.filesystem().arrow)",
    "held filesystem": "fs = keytools.filesystem(); pq.read_table(file, filesystem=fs)",
    "open": "pq.read_table(keytools.open(file))",
    "held open file": "f = keytools.open(file); pq.read_table(f)",
    "closed file": "with keytools.open(file) as f: pq.read_table(f)",
    "parquet file": "f = pq.ParquetFile(keytools.open(file), pre_buffer=True); next(f.iter_batches())",
    "view": "pq.read_table('0.parquet', filesystem=keytools.view(folder))",
    "view of a data set": "ds.dataset('', filesystem=keytools.view(folder).arrow, format='parquet').to_table()",
    "abandoned view": """
        batches = ds.dataset('', filesystem=keytools.view(folder).arrow, format='parquet').to_batches()
        next(batches)
    """,
    "abandoned and dropped view": """
        next(ds.dataset('', filesystem=keytools.view(folder), format='parquet').to_batches())
    """,
    "read_table": "keytools.read_table(folder)",
    "data set": "keytools.dataset(folder).to_table()",
    "abandoned data set": "batches = keytools.dataset(folder).to_batches(); next(batches)",
    "head of a data set": "keytools.dataset(folder).head(5)",
    "cached copy": """
        import fsspec
        with fsspec.open("simplecache::keytools::" + file, keytools=options) as f:
            pq.read_table(f)
    """,
    "url in pandas": """
        import pandas
        pandas.read_parquet("keytools::file://" + file, storage_options=options)
    """,
    "DuckDB with a limit": """
        import duckdb
        data = keytools.dataset(folder)
        duckdb.sql("SELECT * FROM data LIMIT 5").fetchall()
    """,
    "DuckDB over a view": """
        import duckdb
        connection = duckdb.connect()
        connection.register_filesystem(keytools.view(folder))
        connection.sql("SELECT * FROM 'keytools://*.parquet' LIMIT 5").fetchall()
    """,
    "Polars with a limit": "keytools.scan_polars(folder).head(5).collect()",
    "Polars over an open file": """
        import polars
        polars.read_parquet(keytools.open(file), use_pyarrow=True)
    """,
    "Dask": """
        import dask.dataframe
        dask.dataframe.read_parquet(folder, filesystem=keytools.filesystem()).a.sum().compute()
    """,
    "error in a scan": "keytools.dataset([file, damaged]).to_table()  # fails: DecryptionError",
    "error in a view": "pq.read_table(damaged, filesystem=keytools.filesystem())  # fails: DecryptionError",
    "error in a view of a data set": """
        files = ds.dataset([file, damaged], filesystem=keytools.filesystem())
        files.to_table()  # fails: DecryptionError
    """,
    "exit in a scan": """
        for batch in keytools.dataset(folder).to_batches():
            sys.exit("stopped")  # fails: stopped
    """,
    "exception in a scan of a view": """
        for batch in ds.dataset(folder, filesystem=keytools.filesystem(), format='parquet').to_batches():
            raise ValueError  # fails: ValueError
    """,
    "writer over a filesystem": """
        table = pq.read_table(file, filesystem=keytools.filesystem()).slice(0, 1000)
        pq.write_table(table, f"{os.getpid()}.parquet", filesystem=keytools.filesystem())
    """,
    "data set over a filesystem": """
        table = keytools.read_table(file).slice(0, 1000)
        fs = keytools.filesystem().arrow
        ds.write_dataset(table, f"{folder}-{os.getpid()}", format="parquet", filesystem=fs)
    """,
    "write_dataset": "keytools.write_dataset(keytools.dataset(file).head(1000), f'{folder}-{os.getpid()}')",
    "thread": """
        import threading
        read = lambda: pq.read_table(file, filesystem=keytools.filesystem())
        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads: thread.start()
    """,
    "executor": """
        from concurrent.futures import ThreadPoolExecutor
        ThreadPoolExecutor(2).map(lambda file: pq.read_table(keytools.open(file)), [file] * 3)
    """,
    "work at exit": """
        import atexit
        atexit.register(lambda: pq.read_table(file, filesystem=keytools.filesystem()))
        pq.read_table(keytools.open(file))
    """,
    **{
        f"{method}ed child": f"""
        import multiprocessing
        def work():
            assert pq.read_table(file, filesystem=keytools.filesystem()).num_rows
        if __name__ == "__main__":
            child = multiprocessing.get_context("{method}").Process(target=work)
            child.start()
            child.join()
            sys.exit(child.exitcode)
    """
        for method in ("spawn", "fork", "forkserver")
    },
    "os._exit": "b = keytools.dataset(folder).to_batches(); next(b); os._exit(0)",
}
NEEDING_PANDAS = ("pandas", "Dask")
"""Parts of the names of programs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a configuration, two files in a folder, and a file with a damaged page."""
    folder = tmp_path_factory.mktemp("ends")
    (folder / "keytools.yaml").write_text(YAML)
    (folder / "keytools.yaml").chmod(0o600)
    # It is slow to import, and pyarrow does not need it.
    (folder / "without_pandas").mkdir()
    (folder / "without_pandas" / "pandas.py").write_text("raise ImportError")
    keytools = Keytools.from_yaml(folder / "keytools.yaml")
    generator = np.random.default_rng(0)
    for name in ("data/0.parquet", "data/1.parquet", "damaged.parquet"):
        table = pa.table({column: generator.random(ROWS) for column in "abcd"})
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        keytools.write_table(table, path, use_dictionary=False, compression="none")
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    return folder


@pytest.fixture(scope="module")
def busy() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Return code that keeps all cores busy, once a program starts it."""
    command = [sys.executable, "-c", f"import os\nwhile os.getppid() == {os.getpid()}: pass"]
    processes = [subprocess.Popen(command) for _ in range(4 * (os.cpu_count() or 1))]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def program(folder: Path, name: str) -> Path:
    """Write a program."""
    path = folder / f"{name}.py".replace(" ", "-")
    lines = PROGRAMS[name].strip("\n").splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    needs_pandas = any(word in name for word in NEEDING_PANDAS)
    shown = "sys.path.remove(os.path.abspath('without_pandas'))\n" if needs_pandas else ""
    path.write_text(BEGIN + shown + "\n".join(line[indent:] for line in lines))
    return path


def environment(folder: Path, busy: Sequence[subprocess.Popen[bytes]] = ()) -> dict[str, str]:
    path = [str(folder / "without_pandas"), os.environ.get("PYTHONPATH", "")]
    processes = " ".join(str(process.pid) for process in busy)
    return {**os.environ, "BUSY_PROCESSES": processes, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def check(name: str, status: int, stderr: str) -> None:
    _, fails, error = PROGRAMS[name].strip().partition("  # fails: ")
    assert (status, error in stderr) == (bool(fails), True), stderr[-2000:]


@pytest.fixture(scope="module")
def forker(folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", FORK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=folder,
        env=environment(folder),
        text=True,
    )
    yield process
    process.communicate(timeout=60)


ALWAYS = ("filesystem", "open", "abandoned view")
CHOSEN = PROGRAMS if SOAK else [*ALWAYS, *sample([name for name in PROGRAMS if name not in ALWAYS], 8, 1)]


ROUNDS = pytest.mark.parametrize("round_", range(how_many(1, 14)))


@ROUNDS
@pytest.mark.parametrize("name", CHOSEN)
def test_a_program_ends_with_its_own_status(
    folder: Path, forker: subprocess.Popen[str], name: str, round_: int
) -> None:
    assert forker.stdin is not None and forker.stdout is not None
    path = program(folder, name)
    print(path, file=forker.stdin, flush=True)
    check(name, int(forker.stdout.readline()), Path(f"{path}.stderr").read_text())


@ROUNDS
@pytest.mark.parametrize("name", PROGRAMS if SOAK else ALWAYS[-1:])
def test_a_program_ends_with_its_own_status_on_a_busy_machine(
    folder: Path, busy: list[subprocess.Popen[bytes]], name: str, round_: int
) -> None:
    done = subprocess.run(
        [sys.executable, program(folder, name)],
        cwd=folder,
        env=environment(folder, busy),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    for process in busy:
        process.send_signal(signal.SIGSTOP)
    check(name, done.returncode, done.stderr)
