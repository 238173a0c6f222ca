"""A source that becomes shorter while it is read: an error, and no signal that ends the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import itertools, os, sys, threading
from pathlib import Path
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
from parquet_keytools import Keytools, KeytoolsError
from parquet_keytools.storage import locations

folder, action, after = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
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
import contextlib
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
        raise SystemExit
    elif action == "rekey_in_place":
        tools.rekey_in_place(source)
    else:
        getattr(tools, action + "_file")(source, target)
    print("done")
except (KeytoolsError, OSError) as error:
    print("error", error)
assert after in reads or not after, reads
print(sorted(path.name for path in folder.iterdir()))
"""


@pytest.mark.parametrize("action", ["encrypt", "decrypt", "rekey", "rekey_in_place"])
def test_it_is_an_error(tmp_path: Path, action: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), action, "2"], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, (run.returncode, run.stderr[-2000:])
    assert run.stdout.startswith("error") and "source.parquet" in run.stdout, run.stdout
    assert run.stdout.splitlines()[-1] == "['source.parquet']", "nothing is written of it"


@pytest.mark.parametrize("action", ["verify", "read"])
def test_readers_of_it_go_on(tmp_path: Path, action: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), action, "1" if action == "verify" else "0"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode >= 0, "it was ended by a signal"
    assert "done" not in run.stdout, run.stdout
