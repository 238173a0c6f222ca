import gc
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from parquet_keytools.runtime.threads_and_forks import PerProcess


class Thing:
    destroyed: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.process_id = os.getpid()

    def __del__(self) -> None:
        self.destroyed.append(os.getpid())


def in_child(check: Callable[[], object]) -> None:
    """Fork, and run a check in the child."""

    def run() -> None:
        # Without pytest's shutdown, which would run twice.
        os._exit(0 if check() else 1)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(30)
    assert process.exitcode == 0


def test_is_made_once() -> None:
    things = PerProcess(Thing)
    with ThreadPoolExecutor(16) as pool:
        assert len({id(thing) for thing in pool.map(lambda _: things.get(), range(100))}) == 1


def test_take_forgets() -> None:
    things = PerProcess(Thing)
    assert things.take() is None
    first = things.get()
    assert things.take() is first
    assert things.take() is None
    assert things.get() is not first


def test_what_cannot_be_made_is_tried_again() -> None:
    attempts = iter([OSError("no"), None])

    def make() -> Thing:
        if error := next(attempts):
            raise error
        return Thing()

    things = PerProcess(make)
    with pytest.raises(OSError, match="no"):
        things.get()
    things.get()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_makes_its_own_and_destroys_nothing() -> None:
    gc.collect()
    things = PerProcess(Thing)
    parents = id(things.get())
    Thing.destroyed.clear()

    def check() -> bool:
        own = things.get()
        gc.collect()
        return own.process_id == os.getpid() and id(own) != parents and Thing.destroyed == []

    in_child(check)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_takes_nothing_of_its_parent() -> None:
    gc.collect()
    things = PerProcess(Thing)
    things.get()
    Thing.destroyed.clear()
    in_child(lambda: things.take() is None and gc.collect() >= 0 and Thing.destroyed == [])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_while_another_thread_makes_it() -> None:
    go_on = threading.Event()
    begun = threading.Event()
    first = threading.Event()

    def make() -> Thing:
        if not first.is_set():
            first.set()
            begun.set()
            assert go_on.wait(20)
        return Thing()

    things = PerProcess(make)
    thread = threading.Thread(target=things.get)
    thread.start()
    assert begun.wait(20)
    in_child(lambda: things.get().process_id == os.getpid())
    go_on.set()
    thread.join()
