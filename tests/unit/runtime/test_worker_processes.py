"""One function for many files in worker processes: their results, and what happens when a worker ends."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parquet_keytools import audit
from parquet_keytools.errors import ConfigurationError, KmsThrottledError, WorkerProcessEndedError
from parquet_keytools.kms.remote_client import RemoteKmsSettings
from parquet_keytools.runtime import worker_processes
from parquet_keytools.runtime.threads_and_forks import SharedWork
from parquet_keytools.runtime.worker_processes import FileWorkers, command_line_processes, shared_with_workers


class Seen:
    """A dictionary of all processes."""

    def __init__(self, table: Any = None) -> None:
        self.table = {} if table is None else table

    def __reduce__(self) -> tuple[Any, ...]:
        self.table = shared_with_workers(self.table)
        return Seen, (self.table,)


class ForeignError(Exception):
    """Cannot be unpickled, like the exceptions of some SDKs."""

    def __init__(self, status: int, code: int) -> None:
        super().__init__(f"status {status}")


class Work:
    """Acts on a file according to its name."""

    def __init__(self, seen: Seen | None = None) -> None:
        self.seen = seen

    def __call__(self, name: str) -> tuple[str, int, str]:
        if name == "fail":
            raise KmsThrottledError(backend="some", operation="wrap")
        if name == "foreign":
            raise ForeignError(1, 2)
        if name == "say":
            logging.getLogger("some.worker").warning("file %s", name)
            logging.getLogger("some.worker").info("not wanted")
            audit.write(audit.KeyUse("wrap", "ok", "b", "i", "key", None, "me", audit.current_subject()))
            warnings.warn("a file is odd", UserWarning, stacklevel=1)
        if name == "share":
            limits = RemoteKmsSettings(type="any").shared_by(SharedWork.processes)
            return name, limits.max_concurrent_calls, ""
        time.sleep(0.05)
        first = self.seen.table.setdefault("first", name) if self.seen is not None else ""
        if self.seen is not None:
            # Until both processes work: one of them starts earlier.
            self.seen.table[str(os.getpid())] = name
            end = time.monotonic() + 60
            while len(self.seen.table) < 3 and time.monotonic() < end:
                time.sleep(0.01)
        return name, os.getpid(), first


def test_calls_and_what_is_said_of_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In a folder where a hostile file has the name of a module; nothing in it is imported."""
    for name in ("pickle.py", "socket.py", "multiprocessing.py", "typing.py"):
        (tmp_path / name).write_text("raise SystemExit('imported')")
    names = [str(number) for number in range(12)]
    former = Path.cwd()
    os.chdir(tmp_path)
    try:
        with command_line_processes(2), FileWorkers(Work(Seen()), 20, 4) as workers:
            outcomes = [outcome for _, outcome in workers.outcomes(names)]
            results = [outcome for outcome in outcomes if isinstance(outcome, tuple)]
            assert [name for name, _, _ in results] == names
            process_ids = {process_id for _, process_id, _ in results}
            assert len(process_ids) == 2 and os.getpid() not in process_ids
            assert len({first for _, _, first in results}) == 1
            found = dict(workers.outcomes(["fail", "foreign", "share"]))
            assert isinstance(found["fail"], KmsThrottledError) and "too many requests" in str(found["fail"])
            assert isinstance(found["foreign"], RuntimeError) and "ForeignError: status 1" in str(found["foreign"])
            assert found["share"] == ("share", 16, "")
            with pytest.warns(UserWarning, match="a file is odd"):
                assert len(list(workers.outcomes(["say"]))) == 1
    finally:
        os.chdir(former)
    assert [record.getMessage() for record in caplog.records if record.name == "some.worker"] == ["file say"]
    (use,) = [record for record in caplog.records if record.name == audit.LOGGER_NAME]
    assert (use.operation, use.process in process_ids) == ("wrap", True)  # type: ignore[attr-defined]
    for process_id in process_ids:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)


def test_what_cannot_be_pickled_is_called_here() -> None:
    here = threading.Lock()

    def call(_: str) -> bool:
        return here.locked()

    with command_line_processes(4), FileWorkers(call, 100, 3) as workers:
        assert workers.processes == 1
        assert list(workers.outcomes("ab")) == [("a", False), ("b", False)]


class OnlyHere(Work):
    """Cannot be unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return refuse, ()


def refuse() -> OnlyHere:
    raise ConfigurationError("there is no such plug-in.")


def test_what_processes_cannot_be_given_is_an_error() -> None:
    with (
        command_line_processes(2),
        FileWorkers(OnlyHere(), 100, 2) as workers,
        pytest.raises(ConfigurationError, match="there is no such plug-in"),
    ):
        list(workers.outcomes("ab"))


def test_only_the_command_line_starts_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_processes, "ProcessPoolExecutor", None)
    with FileWorkers(Work(), 100_000, 2) as workers:
        ((_, outcome),) = workers.outcomes(["a"])
        assert outcome == ("a", os.getpid(), "")


_SCRIPT = """
import sys
from parquet_keytools.runtime.worker_processes import FileWorkers, command_line_processes

print("begun", flush=True)
with command_line_processes(2), FileWorkers(str.upper, 100, 2) as workers:
    print(workers.processes, [outcome for _, outcome in workers.outcomes("ab")])
"""


def test_a_script_without_a_guard_does_not_start_itself(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "begun\n1 ['A', 'B']\n", done.stderr


def test_the_command_itself_starts_processes(tmp_path: Path) -> None:
    """As installed: its main module is imported again, and then does nothing."""
    (tmp_path / "parquet-keytools").write_text(
        "from parquet_keytools.runtime.worker_processes import FileWorkers, command_line_processes\n"
        "if __name__ == '__main__':\n"
        "    with command_line_processes(2), FileWorkers(str.upper, 100, 2) as workers:\n"
        "        print(workers.processes, [outcome for _, outcome in workers.outcomes('ab')])\n"
    )
    command = [sys.executable, str(tmp_path / "parquet-keytools")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 ['A', 'B']\n", done.stderr


def test_no_program_is_started_that_is_not_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like programs frozen by PyInstaller."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with command_line_processes(2), FileWorkers(Work(), 100, 2) as workers:
        assert workers.processes == 1


def test_an_end_is_an_error_that_names_what_to_do() -> None:
    with command_line_processes(2), FileWorkers(_end, 20, 1) as workers:
        seen = []
        with pytest.raises(WorkerProcessEndedError, match=r"killed.*--processes"):
            seen.extend(name for name, _ in workers.outcomes([str(number) for number in range(20)]))
    assert "10" not in seen


def _end(name: str) -> None:
    if name == "10":
        os._exit(1)


@pytest.mark.parametrize(
    ("processors", "files", "processes"),
    [(2, 2_000, 2), (2, 399, 1), (1, 10_000, 1), (16, 450, 2), (64, 1_000_000, 8), (4, 0, 1)],
)
def test_as_many_as_pay(monkeypatch: pytest.MonkeyPatch, processors: int, files: int, processes: int) -> None:
    monkeypatch.setattr(worker_processes, "available_processors", lambda: processors)
    with command_line_processes(None):
        assert FileWorkers(Work(), files, 2).processes == processes
        assert FileWorkers(Work(), files, 2, visible=False).processes == 1
    assert FileWorkers(Work(), files, 2).processes == 1


def test_processors_are_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def processors(quota: str) -> int:
        read: Callable[..., str] = lambda path, **_: quota  # noqa: E731
        monkeypatch.setattr(Path, "read_text", read)
        return worker_processes.available_processors()

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6), raising=False)
    assert [processors(text) for text in ("max 100000", "250000 100000", "50000 100000", "")] == [6, 2, 1, 6]


def test_limits_are_shared() -> None:
    settings = RemoteKmsSettings(type="any", max_concurrent_calls=3, max_calls_per_second=10)
    shared = settings.shared_by(4)
    assert (shared.max_concurrent_calls, shared.max_calls_per_second) == (1, 2.5)
    assert settings.shared_by(1) is settings
