from __future__ import annotations

import contextvars
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from parquet_keytools.kms.call_traffic import ConcurrentCalls, current_task


@pytest.fixture
def calls() -> Iterator[ConcurrentCalls]:
    made = ConcurrentCalls(4)
    yield made
    made.close()


def test_results_in_the_order_of_the_items(calls: ConcurrentCalls) -> None:
    def slower_at_first(number: int) -> int:
        time.sleep(0.02 if number < 4 else 0)
        return number * 2

    assert calls.map(slower_at_first, range(100)) == [number * 2 for number in range(100)]


def test_nothing(calls: ConcurrentCalls) -> None:
    assert calls.map(abs, []) == []


def test_several_at_a_time_and_not_more(calls: ConcurrentCalls) -> None:
    lock, all_are_there = threading.Lock(), threading.Barrier(5)
    under_way, most = [0], [0]

    def work(number: int) -> None:
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        if number < 5:
            all_are_there.wait(60)
        time.sleep(0.001)
        with lock:
            under_way[0] -= 1

    calls.map(work, range(50))
    assert most == [5], "four threads, and the caller"


def test_a_task_within_a_task(calls: ConcurrentCalls) -> None:
    """With tasks that wait for threads, 50 of them in four threads would wait for ever."""

    def inner(number: int) -> int:
        return sum(calls.map(lambda other: number * other, range(10)))

    assert calls.map(inner, range(50)) == [45 * number for number in range(50)]


def test_from_many_threads(calls: ConcurrentCalls) -> None:
    with ThreadPoolExecutor(32) as pool:
        outcomes = list(pool.map(lambda n: calls.map(lambda m: n * m, range(20)), range(300)))
    assert outcomes == [[n * m for m in range(20)] for n in range(300)]


def test_a_small_task_does_not_wait_for_a_large_one(calls: ConcurrentCalls) -> None:
    begun, small_ended = threading.Event(), threading.Event()

    def work(_: int) -> None:
        begun.set()
        # All of them end only after the small task.
        assert small_ended.wait(60)

    thread = threading.Thread(target=calls.map, args=(work, range(400)))
    thread.start()
    assert begun.wait(60)
    calls.map(lambda _: time.sleep(0.005), range(8))
    assert thread.is_alive()
    small_ended.set()
    thread.join()


def test_each_thread_has_the_context_of_the_caller(calls: ConcurrentCalls) -> None:
    variable = contextvars.ContextVar("variable", default=0)

    def task(value: int) -> list[int]:
        variable.set(value)
        return calls.map(lambda _: (time.sleep(0.001), variable.get())[1], range(20))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(task, range(1, 40))) == [[value] * 20 for value in range(1, 40)]
    assert current_task() is None


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt(), SystemExit(3)])
def test_what_is_raised_ends_the_task(calls: ConcurrentCalls, error: BaseException) -> None:
    begun: list[int] = []
    is_over = threading.Event()

    def work(number: int) -> None:
        begun.append(number)
        if number == 10:
            raise error
        # The others go on while it is raised, however long that takes.
        if number > 10:
            is_over.wait(60)

    with pytest.raises(type(error)):
        calls.map(work, range(1000))
    is_over.set()
    assert calls.map(abs, [-1, -2]) == [1, 2]
    calls._pool.shutdown()
    assert max(begun) <= 10 + 4, "what each of the other threads was at, and no more"


def test_close_lets_tasks_end_and_later_ones_do_without_threads(calls: ConcurrentCalls) -> None:
    results: list[list[int]] = []
    begun, go_on = threading.Event(), threading.Event()

    def work(number: int) -> int:
        begun.set()
        assert go_on.wait(60)
        return number

    thread = threading.Thread(target=lambda: results.append(calls.map(work, range(50))))
    thread.start()
    assert begun.wait(60)
    calls.close()
    calls.close()
    assert calls.map(lambda n: n, range(10)) == list(range(10))
    go_on.set()
    thread.join(60)
    assert results == [list(range(50))]


def test_ctrl_c_does_not_wait_for_calls_that_have_begun() -> None:
    """Nor does the end of the process, beyond the calls that are under way just then."""
    program = """
import os, threading, time
from parquet_keytools.kms.call_traffic import ConcurrentCalls
calls = ConcurrentCalls(4)
all_are_there = threading.Barrier(5)
def work(number):
    if number < 5:
        all_are_there.wait(60)
    if threading.current_thread() is threading.main_thread():
        os.write(1, b"begun\\n")
        time.sleep(0.2)
    else:
        time.sleep(3)
        os.write(1, b"a call ended\\n")
try:
    calls.map(work, range(1000))
except KeyboardInterrupt:
    os.write(1, b"interrupted\\n")
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    printed = process.stdout.read().splitlines()
    assert process.wait(60) == 0
    process.stdout.close()
    after = printed[printed.index("interrupted") + 1 :]
    assert set(after) == {"a call ended"}, "it was not waited for"
    assert len(after) <= 4, "what each of the other threads was at, and no more"


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_of_a_process_in_the_middle_of_a_task_ends(calls: ConcurrentCalls) -> None:
    go_on = threading.Event()
    begun = threading.Event()
    thread = threading.Thread(target=lambda: calls.map(lambda _: (begun.set(), go_on.wait(60)), range(20)))
    thread.start()
    assert begun.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(0 if ConcurrentCalls(4).map(abs, range(-20, 0)) == list(range(20, 0, -1)) else 1)
    assert os.waitpid(child, 0)[1] == 0
    go_on.set()
    thread.join(20)
