"""Threads that share work, and have ended when their caller continues, even if Ctrl-C interrupts it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from parquet_keytools.runtime.threads_and_forks import in_threads, share_out

_SECONDS = 60


@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_results_are_in_the_order_of_the_items(count: int) -> None:
    assert in_threads(lambda number: number * number, range(count), 8) == [n * n for n in range(count)]


def test_threads_work_at_the_same_time_and_their_caller_only_waits() -> None:
    together = threading.Barrier(4)

    def meet(_: int) -> threading.Thread:
        together.wait(_SECONDS)
        return threading.current_thread()

    found = in_threads(meet, range(4), 8)
    assert len(set(found)) == 4 and threading.current_thread() not in found


def test_the_calling_thread_is_among_those_that_share_work_out() -> None:
    together, found = threading.Barrier(3), set[threading.Thread]()

    def work(items: Iterator[int]) -> None:
        found.add(threading.current_thread())
        together.wait(_SECONDS)
        assert set(items) <= set(range(9))

    share_out(work, range(9), 3)
    assert len(found) == 3 and threading.current_thread() in found


def test_each_item_is_taken_once_also_of_a_generator() -> None:
    taken: list[int] = []
    share_out(taken.extend, (number for number in range(10_000)), 4)
    assert sorted(taken) == list(range(10_000))


def test_one_thread_is_the_calling_one() -> None:
    # Threads of other tests in this process may end meanwhile.
    before = set(threading.enumerate())
    found: list[tuple[threading.Thread, int]] = []
    share_out(lambda items: found.extend((threading.current_thread(), item) for item in items), [7], 1)
    assert found == [(threading.current_thread(), 7)] and set(threading.enumerate()) <= before


def test_after_an_error_no_other_item_is_taken() -> None:
    begun, failed = [], threading.Event()

    def step(number: int) -> None:
        begun.append(number)
        if number == 0:
            failed.set()
            raise ValueError(number)
        assert failed.wait(_SECONDS)

    with pytest.raises(ValueError, match="0"):
        in_threads(step, range(100_000), 16)
    assert len(begun) < 1000


def test_the_error_is_that_of_the_first_item_that_fails() -> None:
    """So it is the same one each time: others may fail sooner, and in any order."""
    has_failed = threading.Event()

    def step(number: int) -> None:
        if number == 1:
            assert has_failed.wait(_SECONDS)
        if number == 2:
            has_failed.set()
        if number:
            raise ValueError(number)

    with pytest.raises(ValueError, match="1"):
        in_threads(step, range(10), 4)


def test_what_makes_the_items_may_fail() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise LookupError("no other one")

    with pytest.raises(LookupError, match="no other one"):
        share_out(lambda taken: [None for _ in taken] and None, items(), 3)


def test_an_interruption_goes_before_an_error() -> None:
    """Otherwise, Ctrl-C is treated as the error of one file, and the next file begins."""
    has_taken, fails = threading.Event(), threading.Event()

    def work(items: Iterator[int]) -> None:
        if threading.current_thread() is threading.main_thread():
            next(items)
            has_taken.set()
            assert fails.wait(_SECONDS)
            raise KeyboardInterrupt
        assert has_taken.wait(_SECONDS)
        fails.set()
        raise ValueError

    with pytest.raises(KeyboardInterrupt):
        share_out(work, range(2), 2)


def test_after_an_interruption_no_other_item_is_taken() -> None:
    def step(number: int) -> None:
        if number == 1000:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        # As many as would never end.
        in_threads(step, range(2**62), 16)


def test_no_thread_works_where_another_one_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started, written = threading.Thread.start, list[threading.Thread](), list[int]()

    def start_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        in_threads(written.append, range(10_000), 3)
    assert not started[0].is_alive() and written == []


def test_a_thread_whose_start_is_interrupted_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pool does not know of it, and so does not wait for it."""
    start, started, written = threading.Thread.start, list[threading.Thread](), list[int]()

    def interrupted_start(thread: threading.Thread) -> None:
        started.append(thread)
        start(thread)
        if len(started) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted_start)
    with pytest.raises(KeyboardInterrupt):
        in_threads(written.append, range(10_000), 3)
    for thread in started:
        thread.join(_SECONDS)
    assert len(started) == 2 and written == []


_CTRL_C = """
import os, sys, threading, time
from parquet_keytools.runtime.threads_and_forks import in_threads, share_out

out = open(sys.argv[1], "w+b", buffering=0)

def write(number):
    os.write(1, b"begun" + bytes([10]))
    time.sleep(0.5)
    # Fails where the owner has closed the file.
    out.write(b"x")
    os.write(1, b"written" + bytes([10]))

try:
    if sys.argv[2] == "share_out":
        share_out(lambda items: [write(item) for item in items] and None, range(100), 4)
    else:
        in_threads(write, range(100), 4)
except KeyboardInterrupt:
    out.close()
    print("closed", flush=True)
time.sleep(1)
"""


@pytest.mark.parametrize("way", ["in_threads", "share_out"])
def test_no_thread_writes_after_ctrl_c_when_the_owner_closes_the_file(tmp_path: Path, way: str) -> None:
    """A real signal, and another one while the caller waits for the threads."""
    command = [sys.executable, "-c", _CTRL_C, str(tmp_path / "out"), way]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(3)] == ["begun\n"] * 3
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=_SECONDS)
    assert stderr == "" and process.returncode == 0
    said = stdout.split()
    assert said[-1] == "closed" and "written" in said
    # The calling thread was interrupted in its own write, if it takes part.
    assert said.count("written") in (2, 3, 4)
