"""Files that are being written when a process forks, or when an exception is raised."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.errors import OutputError
from parquet_keytools.files import plaintext_spool

TABLE = pa.table({"a": range(1_000), "b": [f"value {number}" for number in range(1_000)]})


def tools(way: str = "pyarrow") -> Keytools:
    # The module encryptor does what pyarrow cannot do.
    columns = ["*"] if way == "pyarrow" else ["b"]
    table = {"footer_key": "kf", "column_keys": {"kb": columns}, "unlisted_columns": "footer_key"}
    document = {"version": 1, "kms": {"type": "in_memory", "keys": ["kf", "kb"]}, "tables": {"t": table}}
    return Keytools(parse_configuration(document))


def in_child(work: Callable[[], object]) -> None:
    """Run a function in a forked child that ends as a program does, with its objects destroyed."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(OutputError, match=r"x\.parquet is not written by this process: .*forked"):
        call()


@pytest.mark.parametrize("memory_bytes", [0, 64 << 20])
def test_a_child_leaves_what_its_parent_collects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_bytes: int
) -> None:
    keytools = tools()
    filesystem = keytools.filesystem()
    monkeypatch.setattr(plaintext_spool.SpoolRoom.__init__, "__defaults__", (memory_bytes,))
    table = pa.table({"a": np.random.default_rng(1).integers(0, 1 << 60, 500_000)})
    content = pa.BufferOutputStream()
    pq.write_table(table, content, compression="none")
    data = content.getvalue().to_pybytes()
    held = [filesystem.open(str(tmp_path / "x.parquet"), "wb")]
    held[0].write(data[:3_000_000])

    def use_it() -> None:
        refused(lambda: held[0].write(b"x" * 2_000_000))
        refused(held[0].close)
        held.clear()
        gc.collect()
        # Files that it opens itself are its own.
        with filesystem.open(str(tmp_path / "own.parquet"), "wb") as own:
            own.write(data)

    def destroy_it() -> None:
        held.clear()
        gc.collect()

    def leave_its_block() -> None:
        with pytest.raises(ZeroDivisionError), held[0]:
            raise ZeroDivisionError

    for work in (use_it, destroy_it, leave_its_block):
        in_child(work)
    held[0].write(data[3_000_000:])
    held[0].close()
    for name in ("x.parquet", "own.parquet"):
        assert keytools.read_table(tmp_path / name).equals(table)


def test_no_nonce_of_a_spool_is_used_by_two_processes(tmp_path: Path) -> None:
    from parquet_keytools.storage.locations import FileLocation

    room = plaintext_spool.SpoolRoom(FileLocation.resolve(tmp_path / "x.parquet"), memory_bytes=0)
    kept = room.put(bytearray(b"of the parent"))
    in_child(lambda: refused(lambda: room.put(bytearray(b"of the child"))))
    in_child(lambda: room.free(kept))
    assert bytes(room.get(kept)) == b"of the parent"


@pytest.mark.parametrize("way", ["pyarrow", "modules"])
def test_a_child_leaves_the_writer_of_its_parent(tmp_path: Path, way: str) -> None:
    keytools = tools(way)
    held = [keytools.writer(tmp_path / "x.parquet", TABLE.schema)]
    held[0].write(TABLE)

    def use_it() -> None:
        writer = held.pop()
        refused(lambda: writer.write(TABLE))
        refused(writer.close)

    def destroy_it() -> None:
        held.clear()
        gc.collect()

    for work in (use_it, destroy_it):
        in_child(work)
    held[0].write(TABLE)
    result = held[0].close()
    assert result is not None and result.engine == {"modules": "module encryptor"}.get(way, way)
    assert keytools.read_table(tmp_path / "x.parquet").equals(pa.concat_tables([TABLE, TABLE]))
    # No child completed the file, either: its end would be in the middle.
    with keytools.writer(tmp_path / "y.parquet", TABLE.schema) as other:
        other.write(TABLE)
        other.write(TABLE)
    assert (tmp_path / "x.parquet").stat().st_size == (tmp_path / "y.parquet").stat().st_size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.parquet", "y.parquet"]


_PROGRAM = """
import os, sys
import test_forks_and_failures as case

keytools = case.tools()
writer = keytools.writer(sys.argv[1], case.TABLE.schema)
writer.write(case.TABLE)
child = os.fork()
if not child:
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
writer.write(case.TABLE)
writer.close()
print(os.path.getsize(sys.argv[1]))
"""


def test_a_child_that_ends_as_a_script_does_leaves_the_file_of_its_parent(tmp_path: Path) -> None:
    """At its end, Python destroys all objects of the child."""
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path / "x.parquet")]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with tools().writer(tmp_path / "y.parquet", TABLE.schema) as other:
        other.write(TABLE)
        other.write(TABLE)
    assert int(done.stdout) == (tmp_path / "y.parquet").stat().st_size


def writers(keytools: Keytools, path: Path) -> list[Callable[[], Any]]:
    return [
        lambda: pq.ParquetWriter(str(path), TABLE.schema, filesystem=keytools.filesystem()),
        lambda: keytools.writer(path, TABLE.schema),
    ]


@pytest.mark.parametrize("kind", [0, 1], ids=["file system", "writer"])
@pytest.mark.parametrize("failure", [ZeroDivisionError, KeyboardInterrupt, GeneratorExit])
def test_a_file_that_is_closed_because_of_a_failure_is_not_there(
    tmp_path: Path, kind: int, failure: type[BaseException]
) -> None:
    path = tmp_path / "x.parquet"
    error = failure("the failure")

    def write() -> None:
        writer = writers(tools(), path)[kind]()
        try:
            writer.write_table(TABLE)
            raise error
        finally:
            writer.close()

    with pytest.raises(failure) as caught:
        write()
    assert caught.value is error
    (note,) = error.__notes__
    assert note.startswith(f"{path} is not written, because it was closed while this exception was handled")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [0, 1], ids=["file system", "writer"])
def test_failures_of_others_do_not_concern_a_file(tmp_path: Path, kind: int) -> None:
    keytools, path = tools(), tmp_path / "x.parquet"
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        writer = writers(keytools, path)[kind]()
        writer.write_table(TABLE)
        writer.close()
    assert keytools.read_table(path).equals(TABLE)
    path.unlink()
    writer, batches = writers(keytools, path)[kind](), iter([TABLE])
    try:
        while True:
            writer.write_table(next(batches))
    except StopIteration:
        writer.close()
    assert keytools.read_table(path).equals(TABLE)
