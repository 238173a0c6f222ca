import gc
import os
import threading
import weakref
from collections.abc import Callable

import pytest

from parquet_keytools.runtime.threads_and_forks import ForkSafeLock

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def status_of_child(work: Callable[[], int]) -> int:
    """Run work in a forked child, which has a minute; returns its exit status, or 142 for a hang."""
    child = os.fork()
    if child == 0:
        import signal

        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        status = 1
        try:
            status = work()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def take(lock: ForkSafeLock) -> int:
    with lock:
        return 7


def test_keeps_others_out() -> None:
    lock = ForkSafeLock()
    inside: list[int] = []
    most = 0

    def work() -> None:
        nonlocal most
        for _ in range(200):
            with lock:
                inside.append(1)
                most = max(most, len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_opens_when_the_body_fails() -> None:
    lock = ForkSafeLock()
    with pytest.raises(KeyError), lock:
        raise KeyError
    assert take(lock) == 7


def test_a_child_finds_it_open_while_a_thread_of_the_parent_holds_it() -> None:
    lock = ForkSafeLock()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    other = threading.Thread(target=take, args=(lock,))
    try:
        assert status_of_child(lambda: take(lock)) == 7
        # Locks that were made before, after, and in the child too.
        assert status_of_child(lambda: status_of_child(lambda: take(lock))) == 7
        other.start()
        other.join(0.1)
        assert other.is_alive(), "the parent's lock was opened"
    finally:
        done.set()
        thread.join()
        other.join()


def test_a_plain_lock_would_hang() -> None:
    """Proves the test above: it fails with the class that ForkSafeLock replaces."""
    lock = threading.Lock()
    with lock:
        assert status_of_child(lambda: int(lock.acquire(timeout=0.2))) == 0


def test_does_not_keep_locks_alive() -> None:
    locks = [ForkSafeLock() for _ in range(100)]
    references = [weakref.ref(lock) for lock in locks]
    del locks
    gc.collect()
    assert [reference() for reference in references] == [None] * 100
