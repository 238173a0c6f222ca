"""Folders of small files rekeyed in their place by several processes: as one does it, whatever happens."""

from __future__ import annotations

import base64
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults import let_workers_die_at_work
from rotation_case import tree_digest

from parquet_keytools import Keytools
from parquet_keytools.errors import (
    KeytoolsError,
    KmsUnavailableError,
    StorageFailedError,
    WorkerProcessEndedError,
)
from parquet_keytools.rotation import data_set_run
from parquet_keytools.rotation.report import FileRotation, RotationOutcome
from parquet_keytools.rotation.tail import changed_while_rotated
from parquet_keytools.runtime import worker_processes
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.locks import exclusive_folder

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
    # YAML has JSON in it.
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


@pytest.mark.parametrize("key_material", ["internal", "external"])
def test_reports_are_the_same(tmp_path: Path, key_material: str) -> None:
    """With a damaged file in the middle, a plaintext one, and a link that leads nowhere."""
    tools = Keytools.from_yaml(write_config(tmp_path, key_material))
    said = {}
    for processes in (1, 2, 3):
        root = write_files(tools, tmp_path / f"with {processes}")
        damaged = root / "year=1" / "3.parquet"
        content = bytearray(damaged.read_bytes())
        content[60] ^= 1
        damaged.write_bytes(content)
        (root / "year=0" / "1.parquet").symlink_to("nowhere")
        pq.write_table(TABLE, root / "year=0" / "plain.parquet")
        before, seen, progress = tree_digest(root), list[FileRotation](), list[int]()
        report = tools.rekey_in_place(root, on_file=seen.append, on_progress=progress.append, processes=processes)
        said[processes] = facts(report.files, root), report.counts, report.stopped_by
        assert seen == report.files
        assert sum(progress) == report.bytes_written == sum(file.new_size_bytes for file in seen)
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
    assert sorted(said[1][0], key=str) == sorted(said[2][0], key=str) == sorted(said[3][0], key=str)
    assert said[1][1:] == said[2][1:] == said[3][1:]
    # What cannot be looked into comes when it is met, and files in their order.
    for processes in (2, 3):
        ours, theirs = ([file for file in said[n][0] if file[0].name != "1.parquet"] for n in (processes, 1))
        assert ours == theirs


def test_large_files_stay_here(tools: Keytools, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those are done one after the other, in this process, and nobody else."""
    large = folder / "year=0" / "0.parquet"
    names = [f"{number:0200}" for number in range(40_000)]
    tools.write_table(pa.table({"id": range(len(names)), "name": names}), large, compression="none")
    here = list[FileLocation]()
    original = data_set_run.changed_file

    def changed(change: Any, location: FileLocation, locked_folder: str | None) -> Any:
        here.append(location)
        return original(change, location, locked_folder)

    monkeypatch.setattr(data_set_run, "changed_file", changed)
    assert tools.rekey_in_place(folder, processes=2).counts == Counter({RotationOutcome.REKEYED: FILES})
    assert [location.path for location in here] == [str(large)]


def test_few_files_and_private_files_stay_here(
    tmp_path: Path, tools: Keytools, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    monkeypatch.setattr(subprocess, "Popen", None)
    assert tools.rekey_in_place(folder, processes=None).succeeded
    memory = MemoryFileSystem()
    memory.makedirs("/private", exist_ok=True)
    for name in "abc":
        tools.write_table(TABLE, f"/private/{name}.parquet", filesystem=memory)
    report = tools.rekey_in_place("/private", filesystem=memory, processes=2)
    assert report.counts == Counter({RotationOutcome.REKEYED: 3})


def test_copies_become_files_of_their_own_without_a_warning(tools: Keytools, folder: Path) -> None:
    """Whether the first one is replaced when the second one is opened is a matter of chance."""
    first, *others = sorted(folder.rglob("*.parquet"))
    for number in range(6):
        content = bytearray(first.read_bytes())
        (first.parent / f"copy {number}.parquet").write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for processes in (1, 2):
            assert tools.rekey_in_place(folder, processes=processes).succeeded
    assert tools.read_table(folder).num_rows == (len(others) + 7) * TABLE.num_rows


def test_a_locked_folder_is_waited_for(tmp_path: Path, folder: Path) -> None:
    """By worker processes, which take the lock themselves: nothing is replaced meanwhile."""
    before = tree_digest(folder)
    locked = FileLocation.resolve(folder / "year=0" / "0.parquet")
    with exclusive_folder(locked):
        process = start(tmp_path / "config.yaml", folder)
        end = time.monotonic() + 60
        while tree_digest(folder / "year=1") == tree_digest_of(before, "year=1"):
            assert time.monotonic() < end
            time.sleep(0.05)
        now = tree_digest(folder)
        assert all(now[name] == before[name] for name in before if name.startswith("year=0"))
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert f"{FILES} rekeyed" in stdout


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.parquet")}


def tree_digest_of(tree: dict[str, Any], part: str) -> dict[str, Any]:
    return {name.removeprefix(f"{part}/"): digest for name, digest in tree.items() if name.startswith(f"{part}/")}


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


# --- runs that are cut off ---


def is_running(process_id: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process_id}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(process_id: int) -> list[int]:
    """Return the worker processes of a process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == process_id:
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("who", ["parent", "worker", "Ctrl-C"])
def test_a_run_that_was_cut_off_is_repeated(tmp_path: Path, tools: Keytools, folder: Path, who: str) -> None:
    """Held at a lock in the middle of its files."""
    before, originals = tree_digest(folder), contents(folder)
    locked = FileLocation.resolve(folder / "year=1" / "1.parquet")
    with exclusive_folder(locked):
        process = start(tmp_path / "config.yaml", folder)
        end = time.monotonic() + 60
        # The five files before it are done.
        while sum(originals[name] != content for name, content in contents(folder).items()) < 5:
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.05)
        workers = children(process.pid)
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
            while any(is_running(worker) for worker in workers):
                assert time.monotonic() < end
                time.sleep(0.02)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == {"parent": -9, "worker": 1, "Ctrl-C": 130}[who], stderr
    if who == "worker":
        assert re.search(
            r"Failed: \S+\.parquet: its worker process was ended by SIGKILL before it reported what became of "
            r"this\. The file is whole, as it was or changed\. Give the same command again",
            stderr,
        ), stderr
        assert "Stopped: a worker process ended, and no more files were begun." in stderr
    if who == "Ctrl-C":
        assert "Give the same command again" in stderr and "Traceback" not in stderr
    for path in folder.rglob("*.parquet"):
        assert tools.read_table(path).equals(TABLE)
    report = tools.rekey_in_place(folder, processes=3)
    assert report.succeeded and report.counts == Counter({RotationOutcome.REKEYED: FILES})
    after = tree_digest(folder)
    # Nothing is left of the run that was cut off.
    assert before.keys() == after.keys()
    assert all(before[name] != after[name] for name in before)
    assert tools.verify_folder(folder).conforms


def test_a_dead_process_ends_the_run(tools: Keytools, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_workers_die_at_work(monkeypatch)
    before = tree_digest(folder)
    report = tools.rekey_in_place(folder, processes=2)
    assert isinstance(report.stopped_by, WorkerProcessEndedError)
    assert not report.stopped_by.has_begun and report.files == report.failures
    assert all(isinstance(file.error, WorkerProcessEndedError) for file in report.files)
    assert tree_digest(folder) == before


class WarningWorker:
    """What a worker process is to its parent, with a warning of each file."""

    has_ended = False

    def __init__(self, _setup: bytes, _staying: list[Any], warn: Callable[..., None]) -> None:
        self._warn = warn

    def call(self, args: tuple[FileLocation], _: object) -> tuple[FileRotation, list[str]]:
        self._warn(f"{args[0].name} is odd", UserWarning)
        return FileRotation(str(args[0]), RotationOutcome.REKEYED), []

    def hang_up(self) -> None: ...

    def wait(self) -> None: ...


def test_warnings_are_shown_at_the_line_of_the_caller(
    tools: Keytools, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_processes, "_Worker", WarningWorker)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert tools.rekey_in_place(folder, processes=2).counts == Counter({RotationOutcome.REKEYED: FILES})
    assert {str(warning.message) for warning in caught} == {f"{number}.parquet is odd" for number in range(FILES)}
    assert {warning.filename for warning in caught} == {__file__}


class ToldWorker(WarningWorker):
    """Says of a file what a test tells it to say; of others nothing, so that this process does them."""

    answers: ClassVar[dict[str, Any]] = {}
    begun: ClassVar[list[str]] = []

    def call(self, args: tuple[FileLocation], _: object) -> Any:
        (location,) = args
        self.begun.append(location.name)
        answer = self.answers.get(location.name, worker_processes._NEVER_WORKED)
        if isinstance(answer, WorkerProcessEndedError):
            raise answer
        return answer(location) if callable(answer) else answer


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What workers answer, by file; two files are done at a time."""
    monkeypatch.setattr(worker_processes, "_Worker", ToldWorker)
    monkeypatch.setattr(data_set_run, "FILES_AT_A_TIME", 1)
    monkeypatch.setattr(ToldWorker, "answers", {})
    monkeypatch.setattr(ToldWorker, "begun", [])
    return ToldWorker.answers


FIRST, SECOND = "0.parquet", "2.parquet"
NO_KMS = KmsUnavailableError(backend="any", operation="unwrap")
REFUSED = KeytoolsError("it is damaged")
NO_ROOM = OSError(errno.ENOSPC, "no room")
ENDED = WorkerProcessEndedError("its worker process ended before it reported.", has_begun=True)
NOT_BEGUN = WorkerProcessEndedError("a worker process ended before this was begun.", has_begun=False)


def failed(error: Any) -> Callable[[FileLocation], tuple[FileRotation, list[str]]]:
    return lambda location: (FileRotation.failed(str(location), error), [])


def done(location: FileLocation) -> tuple[FileRotation, list[str]]:
    return FileRotation(str(location), RotationOutcome.REKEYED), []


@pytest.mark.parametrize(
    ("first", "second", "stopped_by", "said"),
    [
        (failed(NO_KMS), done, KmsUnavailableError, [FIRST, SECOND]),
        (failed(NO_ROOM), done, StorageFailedError, [FIRST, SECOND]),
        (ENDED, done, WorkerProcessEndedError, [FIRST, SECOND]),
        (NOT_BEGUN, done, WorkerProcessEndedError, [SECOND]),
        (failed(NO_KMS), failed(REFUSED), KmsUnavailableError, [FIRST, SECOND]),
        (failed(NO_KMS), ENDED, KmsUnavailableError, [FIRST, SECOND]),
        (failed(NO_KMS), NOT_BEGUN, KmsUnavailableError, [FIRST]),
        # What fails for the same reason is left for the next run, and so is a large one.
        (failed(NO_KMS), failed(NO_KMS), KmsUnavailableError, [FIRST]),
        (failed(NO_ROOM), failed(NO_KMS), StorageFailedError, [FIRST]),
        (failed(NO_KMS), lambda _: (None, []), KmsUnavailableError, [FIRST]),
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
    """Those that were begun at the same time are finished, and said; nothing happens to all others."""
    before = tree_digest(folder)
    told.update({FIRST: first, SECOND: second})
    report = tools.rekey_in_place(folder, processes=2)
    assert type(report.stopped_by) is stopped_by
    assert [Path(file.path).name for file in report.files] == said
    assert sorted(ToldWorker.begun) == [FIRST, SECOND] and tree_digest(folder) == before
    for file in report.failures:
        assert not isinstance(file.error, WorkerProcessEndedError) or (
            file.error.has_begun and "The file is whole, as it was or changed." in str(file.error)
        )


def test_what_fails_for_itself_ends_nothing(tools: Keytools, folder: Path, told: dict[str, Any]) -> None:
    """A damaged file; one that is removed; one that others change all the time, until they are kept from it."""

    def removed(location: FileLocation) -> Any:
        Path(location.path).unlink()
        return worker_processes._NEVER_WORKED

    changing = f"{FILES - 1}.parquet"
    told.update(
        {FIRST: failed(REFUSED), SECOND: removed, changing: lambda location: (changed_while_rotated(location), [])}
    )
    report = tools.rekey_in_place(folder, processes=2)
    assert report.stopped_by is None and ToldWorker.begun.count(changing) == 3
    outcomes = {Path(file.path).name: file.outcome for file in report.files}
    assert outcomes.pop(FIRST) is RotationOutcome.FAILED
    assert outcomes.pop(SECOND) is RotationOutcome.NOTHING_TO_ROTATE
    assert changing in outcomes and set(outcomes.values()) == {RotationOutcome.REKEYED}
    assert len(outcomes) == FILES - 2


def test_what_others_leave_behind_is_said_and_logged_once(
    tools: Keytools, folder: Path, told: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Their log has it, and comes out here."""
    told[FIRST] = lambda location: (FileRotation(str(location), RotationOutcome.REKEYED), ["a temporary file"])
    told[SECOND] = lambda location: (None, ["another one"])
    report = tools.rekey_in_place(folder, processes=2)
    assert report.succeeded and sorted(report.left_behind) == ["a temporary file", "another one"]
    assert "temporary" not in caplog.text and "another" not in caplog.text
