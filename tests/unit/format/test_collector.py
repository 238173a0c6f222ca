"""The collector rests in a block, and runs after it as it did before."""

from __future__ import annotations

import gc
import os
import threading

import pytest

from parquet_keytools.format.collector import paused_collector

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def test_rests_in_a_block_and_in_blocks_within() -> None:
    assert gc.isenabled()
    with paused_collector():
        assert not gc.isenabled()
        with paused_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_runs_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="x"), paused_collector():
        raise ValueError("x")
    assert gc.isenabled()


def test_stays_disabled_where_the_program_disabled_it() -> None:
    gc.disable()
    try:
        with paused_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_rests_until_the_last_of_several_threads_is_done() -> None:
    entered, leave = threading.Event(), threading.Event()

    def pause() -> None:
        with paused_collector():
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=pause)
    thread.start()
    assert entered.wait(30)
    with paused_collector():
        pass
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_runs_in_a_child_that_was_forked_in_a_block() -> None:
    with paused_collector():
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
        _, status = os.waitpid(child, 0)
    assert os.WEXITSTATUS(status) == 0
    assert gc.isenabled()
