"""Threads that work on many things, and have surely ended when their caller goes on, whatever interrupts it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from parquet_keytools.runtime.working_threads import in_threads, share_out

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
    before = threading.active_count()
    found: list[tuple[threading.Thread, int]] = []
    share_out(lambda items: found.extend((threading.current_thread(), item) for item in items), [7], 1)
    assert found == [(threading.current_thread(), 7)] and threading.active_count() == before


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
    """Else Ctrl-C is taken for the error of one file, and the next file begins."""
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


@pytest.mark.parametrize("caller_works", [True, False])
def test_signals_that_come_again_and_again_do_not_end_the_wait(caller_works: bool) -> None:
    main, others, has_ended = threading.main_thread(), threading.Event(), threading.Event()
    handled: list[int] = []

    def raise_interrupt(number: int, _: object) -> None:
        handled.append(number)
        raise KeyboardInterrupt

    def step(_: int) -> None:
        if threading.current_thread() is main:
            assert others.wait(_SECONDS)
            return
        others.set()
        deadline = time.monotonic() + _SECONDS
        while len(handled) < 5 and time.monotonic() < deadline:
            # One that comes while the wait begins is handled with the next one.
            signal.pthread_kill(main.ident or 0, signal.SIGINT)
            time.sleep(0.002)
        has_ended.set()

    def work(items: Iterator[int]) -> None:
        for item in items:
            step(item)

    before = signal.signal(signal.SIGINT, raise_interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            if caller_works:
                share_out(work, range(2), 2)
            else:
                in_threads(step, range(1), 2)
        assert has_ended.is_set() and len(handled) >= 5
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_thread_that_starts_late_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes before the thread runs: nobody knows of it yet."""
    start, late, begun = threading.Thread.start, list[threading.Thread](), list[int]()

    def interrupted(thread: threading.Thread) -> None:
        late.append(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        in_threads(begun.append, range(3), 3)
    monkeypatch.undo()
    (thread,) = late
    start(thread)
    thread.join(_SECONDS)
    assert not thread.is_alive() and begun == []


def test_no_thread_goes_on_where_another_one_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    start, at_work, written = threading.Thread.start, threading.Event(), list[int]()

    def start_one(thread: threading.Thread) -> None:
        if thread.name == "parquet-keytools-2":
            assert at_work.wait(_SECONDS)
            raise RuntimeError("can't start new thread")
        start(thread)

    def write(number: int) -> None:
        at_work.set()
        time.sleep(0.001)
        written.append(number)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        in_threads(write, range(10_000), 3)
    written_by_then = len(written)
    for thread in threading.enumerate():
        if thread.name == "parquet-keytools-1":
            thread.join(_SECONDS)
    assert len(written) == written_by_then < 10_000


_INTERRUPTED_EVERYWHERE = """
import itertools, sys, threading, time
from parquet_keytools.runtime import working_threads

class Interrupting:
    def __init__(self, place):
        self.left = place

    def __call__(self, frame, event, argument):
        # Signals are handled where a function of Python begins, and where one of C has ended.
        if event in ("call", "c_return"):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt

wrong = []

def write(items, is_over, place):
    for item in items:
        time.sleep(0.002)
        if is_over.is_set():
            wrong.append(place)

for place in itertools.count(1):
    is_over, interrupting = threading.Event(), Interrupting(place)
    work = lambda items: write(items, is_over, place)
    try:
        sys.setprofile(interrupting)
        working_threads._run(work, range(6), 2, caller_works=CALLER_WORKS)
    # The second is what Thread.start makes of it at some places.
    except (KeyboardInterrupt, RuntimeError):
        pass
    finally:
        sys.setprofile(None)
    is_over.set()
    if interrupting.left > 0:
        break
# Threads that work on have come to know of it by then.
time.sleep(0.1)
print(place, wrong)
"""


@pytest.mark.parametrize("caller_works", [True, False])
def test_wherever_an_interruption_comes_no_thread_works_on(caller_works: bool) -> None:
    """In a process of its own: threads that are interrupted within `start` stay half started."""
    program = _INTERRUPTED_EVERYWHERE.replace("CALLER_WORKS", str(caller_works))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=_SECONDS)
    places, wrong = done.stdout.split(maxsplit=1)
    assert int(places) > 50 and wrong == "[]\n", done
