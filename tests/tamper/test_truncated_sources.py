"""A source that becomes shorter while it is read: an error, and no signal that ends the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import contextlib, itertools, os, sys, threading, traceback
from pathlib import Path
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
from parquet_keytools import Keytools, KeytoolsError
from parquet_keytools.storage import locations

def do(folder, action, after):
    tools = Keytools.from_mapping({
        "version": 1, "kms": {"type": "in_memory", "keys": ["kf", "ka"]},
        "tables": {"t": {"footer_key": "kf", "column_keys": {"ka": ["a"]}}},
    })
    table = pa.table({"a": np.random.default_rng(1).random(600_000)})
    source, target = folder / "source.parquet", folder / "target.parquet"
    if action == "encrypt":
        pq.write_table(table, source, row_group_size=50_000, compression="none", use_dictionary=False)
    else:
        tools.write_table(table, source, row_group_size=50_000, compression="none", use_dictionary=False)
    before = source.read_bytes()

    # The file is cut when it was opened and its footer read: at a read in the middle of its data.
    numbers, reads, one_at_a_time = itertools.count(1), [], threading.Lock()
    original = locations.open_source
    class Cut:
        def __init__(self, inner): self.inner, self.path, self.size_bytes = inner, inner.path, inner.size_bytes
        def read_at(self, offset, length):
            if length > 100_000:
                # Several threads read: none reads all the rest before one of them has cut the file.
                with one_at_a_time:
                    number = next(numbers)
                    reads.append(number)
                    data = self.inner.read_at(offset, length)
                    if number == after: os.truncate(source, 8192)
                    bytes(data)  # What was mapped is touched only now.
                    return data
            return self.inner.read_at(offset, length)
    @contextlib.contextmanager
    def opened(location):
        with original(location) as inner:
            yield Cut(inner)
    for module in list(sys.modules.values()):
        if getattr(module, "open_source", None) is original:
            module.open_source = opened
    try:
        if action == "read":
            os.truncate(source, 8192) if after == 0 else None
            tools.read_table(source)
        elif action == "verify":
            report = tools.verify_file(source)
            assert report.violations, report
            return
        elif action == "rekey_in_place":
            tools.rekey_in_place(source)
        else:
            getattr(tools, action + "_file")(source, target)
        print("done")
    except (KeytoolsError, OSError) as error:
        print("error", error)
    assert after in reads or not after, reads
    print(sorted(path.name for path in folder.iterdir()))

# What is imported takes longest: each action has a fork of this process.
for job in sys.argv[2:]:
    action, after = job.split(":")
    folder = Path(sys.argv[1]) / action
    folder.mkdir()
    child = os.fork()
    if child == 0:
        output = os.open(f"{folder}.txt", os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1), os.dup2(output, 2)
        try:
            do(folder, action, int(after))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    Path(f"{folder}.status").write_text(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Return the exit status and the output of the process for each action."""
    folder = tmp_path_factory.mktemp("truncated")
    jobs = ("encrypt:2", "decrypt:2", "rekey:2", "rekey_in_place:2", "verify:1", "read:0")
    subprocess.run([sys.executable, "-c", PROGRAM, str(folder), *jobs], check=True, timeout=300)
    actions = [job.partition(":")[0] for job in jobs]
    return {
        action: (int((folder / f"{action}.status").read_text()), (folder / f"{action}.txt").read_text())
        for action in actions
    }


@pytest.mark.parametrize("action", ["encrypt", "decrypt", "rekey", "rekey_in_place"])
def test_it_is_an_error(ended: dict[str, tuple[int, str]], action: str) -> None:
    status, output = ended[action]
    assert status == 0, (status, output[-2000:])
    assert output.startswith("error") and "source.parquet" in output, output
    assert output.splitlines()[-1] == "['source.parquet']", "nothing is written of it"


@pytest.mark.parametrize("action", ["verify", "read"])
def test_readers_of_it_go_on(ended: dict[str, tuple[int, str]], action: str) -> None:
    status, output = ended[action]
    assert status >= 0, "it was ended by a signal"
    assert "done" not in output, output
