"""Folders of small files re-keyed in place by several processes: as by one process, whatever fails."""

from __future__ import annotations

import base64
import errno
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rotation_case import tree_digest
from soak import SOAK

from parquet_keytools import Keytools
from parquet_keytools.errors import (
    KeytoolsError,
    KmsUnavailableError,
    StorageFailedError,
    WorkerProcessEndedError,
)
from parquet_keytools.rotation import data_set_run
from parquet_keytools.rotation.file_keys import changed_while_rotated
from parquet_keytools.rotation.report import FileRotation, RotationOutcome
from parquet_keytools.runtime import worker_processes
from parquet_keytools.runtime.worker_processes import command_line_processes
from parquet_keytools.storage.local_files import exclusive_folder
from parquet_keytools.storage.locations import FileLocation

TABLE = pa.table({"id": range(100), "name": [f"name {number}" for number in range(100)]})
FILES = 9
HERE = str(Path(__file__).parent)


def write_config(tmp_path: Path, key_material: str = "internal") -> Path:
    path = tmp_path / "config.yaml"
    path.touch(mode=0o600)
    keys = {name: base64.b64encode(name.encode() * 4).decode() for name in ("foot", "some")}
    table: dict[str, Any] = {
        "footer_key": "foot",
        "column_keys": {"some": ["name"]},
        "unlisted_columns": "footer_key",
    }
    table["key_material"] = key_material
    # JSON is valid YAML.
    path.write_text(json.dumps({"version": 1, "kms": {"type": "in_memory", "keys": keys}, "tables": {"t": table}}))
    return path


def write_files(tools: Keytools, root: Path) -> Path:
    for number in range(FILES):
        path = root / f"year={number % 2}" / f"{number}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        tools.write_table(TABLE, path)
    return root


@pytest.fixture
def tools(tmp_path: Path) -> Keytools:
    return Keytools.from_yaml(write_config(tmp_path))


@pytest.fixture
def folder(tmp_path: Path, tools: Keytools) -> Path:
    return write_files(tools, tmp_path / "data")


def facts(files: list[FileRotation], root: Path) -> list[tuple[Any, ...]]:
    return [
        (Path(file.path).relative_to(root), file.outcome, file.how, str(file.error).replace(str(root), "ROOT"))
        for file in files
    ]


@pytest.mark.parametrize("key_material", ["internal", "external"] if SOAK else ["external"])
@pytest.mark.usefixtures("warm_workers")
def test_reports_are_the_same(tmp_path: Path, key_material: str) -> None:
    """With a damaged file in the middle, a plaintext file, and a dangling link."""
    tools = Keytools.from_yaml(write_config(tmp_path, key_material))
    said = {}
    for processes in (1, 2):
        root = write_files(tools, tmp_path / f"with {processes}")
        damaged = root / "year=1" / "3.parquet"
        content = bytearray(damaged.read_bytes())
        content[60] ^= 1
        damaged.write_bytes(content)
        (root / "year=0" / "1.parquet").symlink_to("nowhere")
        pq.write_table(TABLE, root / "year=0" / "plain.parquet")
        before, seen, progress = tree_digest(root), list[FileRotation](), list[int]()
        # The progress callback stays in this process.
        on_progress = progress.append if processes == 1 else None
        with command_line_processes(processes):
            report = tools.rekey_in_place(root, on_file=seen.append, on_progress=on_progress)
        said[processes] = facts(report.files, root), report.counts, report.stopped_by
        assert seen == report.files
        assert report.bytes_written == sum(file.new_size_bytes or 0 for file in seen)
        assert processes > 1 or sum(progress) == report.bytes_written
        after = tree_digest(root)
        assert before.keys() == after.keys()
        kept = {Path(name).name for name in before if before[name] == after[name] and name.endswith("parquet")}
        assert kept >= {"3.parquet", "plain.parquet"} and len(kept) <= 3
        for path in (damaged, root / "year=0" / "1.parquet", root / "year=0" / "plain.parquet"):
            path.unlink()
        assert sum(tools.read_table(path).equals(TABLE) for path in root.rglob("*.parquet")) == FILES - 1
        if key_material == "internal":
            assert tools.verify_folder(root).conforms
    assert said[1][1][RotationOutcome.REKEYED] == FILES - 1
    assert sorted(said[1][0], key=str) == sorted(said[2][0], key=str)
    assert said[1][1:] == said[2][1:]
    # An unreadable entry is reported where the walk meets it, and files in order.
    ours, theirs = ([file for file in said[n][0] if file[0].name != "1.parquet"] for n in (2, 1))
    assert ours == theirs


@pytest.mark.usefixtures("warm_workers")
def test_large_files_stay_here(tools: Keytools, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These files are processed one after the other, only in this process."""
    large = folder / "year=0" / "0.parquet"
    names = [f"{number:0200}" for number in range(40_000)]
    tools.write_table(pa.table({"id": range(len(names)), "name": names}), large, compression="none")
    here = list[FileLocation]()
    original = data_set_run.changed_file

    def changed(change: Any, location: FileLocation) -> Any:
        here.append(location)
        return original(change, location)

    monkeypatch.setattr(data_set_run, "changed_file", changed)
    with command_line_processes(2):
        assert tools.rekey_in_place(folder).counts == Counter({RotationOutcome.REKEYED: FILES})
    assert [location.path for location in here] == [str(large)]


def test_few_files_and_private_files_stay_here(
    tmp_path: Path, tools: Keytools, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    monkeypatch.setattr(worker_processes, "ProcessPoolExecutor", None)
    assert tools.rekey_in_place(folder).succeeded
    with command_line_processes(None):
        assert tools.rekey_in_place(folder).succeeded
    memory = MemoryFileSystem()
    memory.makedirs("/private", exist_ok=True)
    for name in "abc":
        tools.write_table(TABLE, f"/private/{name}.parquet", filesystem=memory)
    with command_line_processes(2):
        report = tools.rekey_in_place("/private", filesystem=memory)
    assert report.counts == Counter({RotationOutcome.REKEYED: 3})


@pytest.mark.usefixtures("warm_workers")
def test_copies_become_files_of_their_own_without_a_warning(tools: Keytools, folder: Path) -> None:
    """Whether the first one is replaced when the second one is opened is a matter of chance."""
    first, *others = sorted(folder.rglob("*.parquet"))
    for number in range(6):
        content = bytearray(first.read_bytes())
        (first.parent / f"copy {number}.parquet").write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for processes in (1, 2):
            with command_line_processes(processes):
                assert tools.rekey_in_place(folder).succeeded
    assert tools.read_table(folder).num_rows == (len(others) + 7) * TABLE.num_rows


def wait_until_changed(folder: Path, before: dict[str, Any], part: str) -> None:
    """Wait until each file of a part of the folder was replaced."""
    end = time.monotonic() + 200
    while any(
        hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
        for name, digest in before.items()
        if name.startswith(part)
    ):
        assert time.monotonic() < end
        time.sleep(0.05)


def start(config: Path, folder: Path, *more: str) -> subprocess.Popen[str]:
    program = "from parquet_keytools.cli import main; main()"
    command = [sys.executable, "-c", program, "rekey", str(folder), "--in-place", "--config", str(config)]
    return subprocess.Popen(
        [*command, "--processes", "2", *more],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


# --- interrupted runs ---


def is_running(process_id: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process_id}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def workers_of(process_id: int) -> list[int]:
    """Return the worker processes of a process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            is_worker = b"spawn_main" in (path.parent / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == process_id and is_worker:
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("who", ["parent", "worker", "Ctrl-C"])
def test_a_run_that_was_cut_off_is_repeated(tmp_path: Path, tools: Keytools, folder: Path, who: str) -> None:
    """Held at a lock in the middle of its files, which worker processes take: nothing is replaced meanwhile."""
    before = tree_digest(folder)
    locked = FileLocation.resolve(folder / "year=1" / "1.parquet")
    with exclusive_folder(locked):
        process = start(tmp_path / "config.yaml", folder)
        # The five files before it are done.
        wait_until_changed(folder, before, "year=0")
        now = tree_digest(folder)
        assert all(now[name] == before[name] for name in before if name.startswith("year=1"))
        workers = workers_of(process.pid)
        assert len(workers) == 2
        if who == "parent":
            process.kill()
        elif who == "worker":
            os.kill(workers[0], signal.SIGKILL)
        else:
            os.killpg(process.pid, signal.SIGINT)
        if who == "parent":
            process.wait(60)
            # They end with it, in the middle of files whose folder is still locked.
            end = time.monotonic() + 60
            while any(is_running(worker) for worker in workers):
                assert time.monotonic() < end
                time.sleep(0.02)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == {"parent": -9, "worker": 1, "Ctrl-C": 130}[who], stderr
    if who == "worker":
        assert "Stopped: a worker process was killed" in stderr
    if who != "parent":
        assert "Repeat the command" in stderr and "Traceback" not in stderr
    for path in folder.rglob("*.parquet"):
        assert tools.read_table(path).equals(TABLE)
    between = tree_digest(folder)
    assert tools.rekey_in_place(folder).counts == Counter({RotationOutcome.REKEYED: FILES})
    after = tree_digest(folder)
    # The interrupted run leaves nothing.
    assert before.keys() == after.keys()
    assert not any(after[name] in (before[name], between[name]) for name in after if name.endswith(".parquet"))
    assert tools.verify_folder(folder).conforms


class ToldWorkers:
    """Worker processes that report for each file what a test sets; they process two files at a time."""

    processes = 2
    answers: ClassVar[dict[str, Any]] = {}
    begun: ClassVar[list[str]] = []

    def __init__(self, function: Callable[[FileLocation], Any], *_: object, **__: object) -> None:
        self._function = function

    def __enter__(self) -> ToldWorkers:
        return self

    def __exit__(self, *_: object) -> None: ...

    def outcomes(self, files: Iterator[FileLocation]) -> Iterator[tuple[FileLocation, Any]]:
        while task := list(itertools.islice(files, 2)):
            self.begun.extend(location.name for location in task)
            for location in task:
                answer = self.answers.get(location.name, self._function)
                if isinstance(answer, WorkerProcessEndedError):
                    raise answer
                yield location, answer(location)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The workers' answers, by file."""
    monkeypatch.setattr(data_set_run, "FileWorkers", ToldWorkers)
    monkeypatch.setattr(ToldWorkers, "answers", {})
    monkeypatch.setattr(ToldWorkers, "begun", [])
    with command_line_processes(2):
        yield ToldWorkers.answers


FIRST, SECOND = "0.parquet", "2.parquet"
NO_KMS = KmsUnavailableError(backend="any", operation="unwrap")
REFUSED = KeytoolsError("it is damaged")
NO_ROOM = OSError(errno.ENOSPC, "no room")
ENDED = WorkerProcessEndedError("a worker process was killed.")


def failed(error: Any) -> Callable[[FileLocation], FileRotation]:
    return lambda location: FileRotation.failed(str(location), error)


def done(location: FileLocation) -> FileRotation:
    return FileRotation(str(location), RotationOutcome.REKEYED)


@pytest.mark.parametrize(
    ("first", "second", "stopped_by", "said"),
    [
        (failed(NO_KMS), done, KmsUnavailableError, [FIRST, SECOND]),
        (failed(NO_ROOM), done, StorageFailedError, [FIRST, SECOND]),
        (ENDED, done, WorkerProcessEndedError, []),
        (done, ENDED, WorkerProcessEndedError, [FIRST]),
        (failed(NO_KMS), failed(REFUSED), KmsUnavailableError, [FIRST, SECOND]),
        (failed(NO_KMS), ENDED, WorkerProcessEndedError, [FIRST]),
        # Files that fail for the same reason are left for the next run.
        (failed(NO_KMS), failed(NO_KMS), KmsUnavailableError, [FIRST]),
        (failed(NO_ROOM), failed(NO_KMS), StorageFailedError, [FIRST]),
    ],
)
def test_what_is_at_an_end_gets_no_other_file(
    tools: Keytools,
    folder: Path,
    told: dict[str, Any],
    first: Any,
    second: Any,
    stopped_by: type[Exception],
    said: list[str],
) -> None:
    """Files that were started at the same time are finished and reported; all others are untouched."""
    before = tree_digest(folder)
    told.update({FIRST: first, SECOND: second})
    report = tools.rekey_in_place(folder)
    assert type(report.stopped_by) is stopped_by
    outcomes = {Path(file.path).name: file.outcome for file in report.files}
    left = [name for name, outcome in outcomes.items() if outcome is RotationOutcome.NOT_ATTEMPTED]
    assert sorted(outcomes.keys() - left) == said
    assert len(outcomes) == (len(said) if stopped_by is WorkerProcessEndedError else FILES)
    assert ToldWorkers.begun == [FIRST, SECOND] and tree_digest(folder) == before


def test_what_fails_for_itself_ends_nothing(tools: Keytools, folder: Path, told: dict[str, Any]) -> None:
    """A damaged file; a removed one; and one that others change all the time, until they are locked out."""

    def removed(location: FileLocation) -> Any:
        Path(location.path).unlink()
        return FileRotation(location.path, RotationOutcome.NOTHING_TO_ROTATE)

    changing = f"{FILES - 1}.parquet"
    told.update({FIRST: failed(REFUSED), SECOND: removed, changing: changed_while_rotated})
    report = tools.rekey_in_place(folder)
    assert report.stopped_by is None and ToldWorkers.begun.count(changing) == 1
    outcomes = {Path(file.path).name: file.outcome for file in report.files}
    assert outcomes.pop(FIRST) is RotationOutcome.FAILED
    assert outcomes.pop(SECOND) is RotationOutcome.NOTHING_TO_ROTATE
    assert changing in outcomes and set(outcomes.values()) == {RotationOutcome.REKEYED}
    assert len(outcomes) == FILES - 2
