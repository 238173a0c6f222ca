"""One function in several processes: what comes back from them, and what happens when one ends."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from parquet_keytools import audit
from parquet_keytools.errors import ConfigurationError, KmsThrottledError, WorkerProcessEndedError
from parquet_keytools.kms.contract import RemoteKmsSettings
from parquet_keytools.runtime import worker_processes
from parquet_keytools.runtime.fork_safety import SharedWork
from parquet_keytools.runtime.presentation import saying_what_is_waited_for, waiting_for
from parquet_keytools.runtime.worker_processes import StaysInParent, WorkerProcesses


class Seen(StaysInParent):
    """Counts what workers show it, and refuses what it knows."""

    def __init__(self) -> None:
        self.process_ids: set[int] = set()

    def show(self, number: int, *, process_id: int) -> int:
        if number == 13:
            raise ValueError("13 is refused")
        self.process_ids.add(process_id)
        return os.getpid()


class ForeignError(Exception):
    """Does not come out of a pickle, as those of some SDKs."""

    def __init__(self, status: int, code: int) -> None:
        super().__init__(f"status {status}")


def square(seen: Seen, number: int, *, kind: str = "") -> tuple[int, int]:
    if kind == "fail":
        raise KmsThrottledError(backend="some", operation="wrap")
    if kind == "foreign":
        raise ForeignError(1, 2)
    if kind == "cannot be sent":
        return threading.Lock()  # type: ignore[return-value]
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "say":
        logging.getLogger("some.worker").warning("number %d", number)
        logging.getLogger("some.worker").info("not wanted")
        audit.write(audit.KeyUse("wrap", "ok", "b", "i", "key", None, "me", audit.current_subject()))
        warnings.warn(f"number {number}", UserWarning, stacklevel=1)
    if kind == "wait":
        with waiting_for("the other side"):
            time.sleep(2.5)
    if kind == "share":
        return RemoteKmsSettings(type="any").shared_by(SharedWork.processes).max_concurrent_calls, 0
    time.sleep(0.05)
    return number**2, seen.show(number, process_id=os.getpid())


def test_calls_and_what_is_said_of_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In a folder where a hostile file has the name of a module; nothing of it is imported."""
    for name in ("pickle.py", "socket.py", "multiprocessing.py", "typing.py"):
        (tmp_path / name).write_text("raise SystemExit('imported')")
    seen, here = Seen(), os.getpid()
    former = Path.cwd()
    os.chdir(tmp_path)
    try:
        with WorkerProcesses(partial(square, seen), 100, 2, 4) as workers, ThreadPoolExecutor(8) as pool:
            assert workers.calls_at_a_time == 8
            assert list(pool.map(workers, range(12))) == [(number**2, here) for number in range(12)]
            assert len(seen.process_ids) == 2 and here not in seen.process_ids
            with pytest.raises(ValueError, match="13 is refused"):
                workers(13)
            with pytest.raises(KmsThrottledError, match="too many requests"):
                workers(1, kind="fail")
            with pytest.raises(RuntimeError, match="ForeignError: status 1"):
                workers(1, kind="foreign")
            with pytest.raises(RuntimeError, match="lock"):
                workers(1, kind="cannot be sent")
            assert workers(1, kind="share")[0] == 16
            with pytest.warns(UserWarning, match="number 5") as caught:
                assert workers(5, kind="say")[0] == 25
            said: list[str] = []
            with saying_what_is_waited_for(said.append):
                workers(6, kind="wait")
    finally:
        os.chdir(former)
    assert [record.getMessage() for record in caplog.records if record.name == "some.worker"] == ["number 5"]
    (use,) = [record for record in caplog.records if record.name == audit.LOGGER_NAME]
    assert (use.operation, use.process in seen.process_ids) == ("wrap", True)  # type: ignore[attr-defined]
    assert [warning.filename for warning in caught] == [__file__]
    assert said == ["Waiting for the other side ..."]
    assert_gone(seen.process_ids)


def assert_gone(process_ids: set[int]) -> None:
    assert process_ids
    for process_id in process_ids:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)


def test_what_cannot_be_pickled_is_called_here() -> None:
    here = threading.Lock()

    def call() -> bool:
        return here.locked()

    with WorkerProcesses(call, 100, 4, 3) as workers:
        assert (workers.calls_at_a_time, workers()) == (3, False)


@pytest.mark.parametrize("allowed", [0, 1])
def test_fewer_processes_work_where_no_more_can_be_started(monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
    seen, start, started = Seen(), subprocess.Popen, list[object]()

    def limited(*args: Any, **kwargs: Any) -> Any:
        if len(started) == allowed:
            raise BlockingIOError(errno.EAGAIN, "resource temporarily unavailable")
        started.append(start(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", limited)
    with WorkerProcesses(partial(square, seen), 100, 2, 2) as workers, ThreadPoolExecutor(4) as pool:
        results = [pool.submit(workers, number) for number in range(8)]
        assert [result.result(60)[0] for result in results] == [number**2 for number in range(8)]
    assert len(seen.process_ids) == 1
    assert (os.getpid() in seen.process_ids) == (allowed == 0)


@pytest.mark.parametrize("alive", [0, 1])
def test_what_processes_do_not_begin_is_done_here(monkeypatch: pytest.MonkeyPatch, alive: int) -> None:
    """They end at once, as where memory is short, or where Python is not what `sys.executable` says."""
    seen, start, started = Seen(), subprocess.Popen, list[object]()

    def dead(command: list[str], **kwargs: Any) -> Any:
        started.append(None)
        return start(command if len(started) <= alive else [sys.executable, "-c", ""], **kwargs)

    monkeypatch.setattr(subprocess, "Popen", dead)
    with WorkerProcesses(partial(square, seen), 100, 2, 2) as workers, ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            assert [result for result, _ in pool.map(workers, range(8))] == [number**2 for number in range(8)]
    assert len(started) == 2
    assert len(seen.process_ids) == alive + 1 and os.getpid() in seen.process_ids


def test_what_processes_do_not_begin_before_the_end_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Ctrl-C comes twice while they start: nothing goes on behind the back of the caller."""
    seen, start, started = Seen(), subprocess.Popen, threading.Semaphore(0)

    def late(command: list[str], **kwargs: Any) -> Any:
        started.release()
        return start([sys.executable, "-c", "import time; time.sleep(600)"], **kwargs)

    def called(number: int) -> BaseException | None:
        try:
            workers(number)
        except WorkerProcessEndedError as error:
            return error
        return None

    monkeypatch.setattr(subprocess, "Popen", late)
    monkeypatch.setattr(worker_processes, "_END_SECONDS", 0.1)
    with ThreadPoolExecutor(4) as pool:
        with WorkerProcesses(partial(square, seen), 100, 2, 2) as workers:
            calls = [pool.submit(called, number) for number in range(8)]
            assert started.acquire(timeout=60) and started.acquire(timeout=60)
        errors = [call.result(60) for call in calls]
    assert all(isinstance(error, WorkerProcessEndedError) and not error.has_begun for error in errors)
    assert not seen.process_ids


def test_what_a_process_may_have_begun_is_not_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not understood before it says that it is ready: it may be at work when it is ended."""
    seen = Seen()

    def take(worker: object, kind: str, *content: object) -> None:
        raise ValueError(kind)

    monkeypatch.setattr(worker_processes._Worker, "_take", take)
    with WorkerProcesses(partial(square, seen), 100, 2, 1) as workers:
        for _ in range(2):
            with pytest.raises(WorkerProcessEndedError):
                workers(1)
    assert os.getpid() not in seen.process_ids


class OnlyHere:
    """What a plug-in that was registered by the program itself comes to in a worker."""

    def __reduce__(self) -> tuple[Any, ...]:
        return only_here, (os.getpid(),)

    def __call__(self, number: int) -> int:
        return number**2


def only_here(process_id: int) -> OnlyHere:
    if os.getpid() != process_id:
        raise ConfigurationError("there is no such plug-in.")
    return OnlyHere()


def test_what_processes_cannot_be_given_is_used_here(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), WorkerProcesses(OnlyHere(), 100, 2, 2) as workers:
        assert [workers(number) for number in range(5)] == [number**2 for number in range(5)]
    assert "a worker process lacks what it needs: there is no such plug-in." in caplog.text


def test_no_program_is_started_that_is_not_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with uWSGI, whose Python says that it is `uwsgi`, and in programs frozen by PyInstaller."""
    monkeypatch.setattr(subprocess, "Popen", None)
    for name, frozen in (("uwsgi", False), ("Application", False), ("", False), ("python-app", True)):
        monkeypatch.setattr(sys, "executable", str(tmp_path / name) if name else "")
        monkeypatch.setattr(sys, "frozen", frozen, raising=False)
        with WorkerProcesses(partial(square, Seen()), 100, 2, 2) as workers:
            assert workers(3)[0] == 9


def test_a_killed_process_is_an_error_and_ends_the_work() -> None:
    seen = Seen()
    with WorkerProcesses(partial(square, seen), 100, 2, 1) as workers, ThreadPoolExecutor(2) as pool:
        killed, other = pool.submit(workers, 1, kind="killed"), pool.submit(workers, 2)
        with pytest.raises(WorkerProcessEndedError, match=r"was ended by SIGKILL before it reported.*--processes"):
            killed.result(60)
        assert other.result(60)[0] == 4
        for _ in range(3):
            with pytest.raises(WorkerProcessEndedError) as caught:
                workers(3)
            assert not caught.value.has_begun
    assert_gone(seen.process_ids)


@pytest.mark.parametrize(
    ("processors", "files", "processes"),
    [(2, 2_000, 2), (2, 399, 1), (1, 10_000, 1), (16, 450, 2), (64, 1_000_000, 8), (4, 0, 1)],
)
def test_as_many_as_pay(monkeypatch: pytest.MonkeyPatch, processors: int, files: int, processes: int) -> None:
    monkeypatch.setattr(worker_processes, "available_processors", lambda: processors)
    assert worker_processes.automatic_processes(files) == processes


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
