import gc
import os
import random
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from faults import TurnedClock

from parquet_keytools.errors import KmsError, KmsUnavailableError
from parquet_keytools.keys.key_wrapping import KekCache

LONG = 1000.0


class Loader:
    """Loads `key!` for each key, and records the requests."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def __call__(self, keys: list[str]) -> list[str | KmsError]:
        self.calls.append(keys)
        return [f"{key}!" for key in keys]


@pytest.fixture
def clock() -> TurnedClock:
    return TurnedClock()


@pytest.fixture
def cache(clock: TurnedClock) -> KekCache[str, str]:
    return KekCache(clock)


@pytest.fixture
def load() -> Loader:
    return Loader()


def unavailable() -> KmsUnavailableError:
    return KmsUnavailableError(backend="test", operation="unwrap")


def test_loads_once_and_keeps_the_order(cache: KekCache[str, str], load: Loader) -> None:
    assert cache.get_many(["b", "a", "b"], load, LONG) == ["b!", "a!", "b!"]
    assert cache.get_many(["c", "a", "b"], load, LONG) == ["c!", "a!", "b!"]
    assert load.calls == [["b", "a"], ["c"]]


def test_nothing_is_loaded_for_nothing(cache: KekCache[str, str], load: Loader) -> None:
    assert cache.get_many([], load, LONG) == [] and load.calls == []


def test_expires(cache: KekCache[str, str], load: Loader, clock: TurnedClock) -> None:
    """Arrow's read cache never expires: a revoked master key would keep working."""
    cache.get_many(["a"], load, 600)
    clock.seconds += 599.9
    cache.get_many(["a"], load, 600)
    assert len(load.calls) == 1
    clock.seconds += 0.1
    cache.get_many(["a"], load, 600)
    assert len(load.calls) == 2


def test_use_does_not_prolong_life(cache: KekCache[str, str], load: Loader, clock: TurnedClock) -> None:
    """A cache that counts from the last use would keep a busy key forever."""
    for _ in range(10):
        cache.get_many(["a"], load, 600)
        clock.seconds += 100
    assert len(load.calls) == 2


def test_each_caller_has_its_own_lifetime(cache: KekCache[str, str], load: Loader, clock: TurnedClock) -> None:
    cache.get_many(["a"], load, 600)
    clock.seconds += 10
    cache.get_many(["a"], load, 5)
    assert len(load.calls) == 2, "one who accepts 5 seconds got a key of 10"
    clock.seconds += 5
    cache.get_many(["a"], load, 600)
    assert len(load.calls) == 3, "what was loaded to live 5 seconds lived longer"


def test_life_begins_when_the_load_ends(clock: TurnedClock, cache: KekCache[str, str], load: Loader) -> None:
    def slow(keys: list[str]) -> list[str | KmsError]:
        clock.seconds += 700
        return load(keys)

    cache.get_many(["a"], slow, 600)
    cache.get_many(["a"], load, 600)
    assert len(load.calls) == 1


def test_lifetime_zero_keeps_nothing(cache: KekCache[str, str], load: Loader) -> None:
    for _ in range(3):
        cache.get_many(["a"], load, 0)
    assert len(load.calls) == 3


class Kek:
    """A key that can be looked for in memory."""


def test_what_has_expired_is_forgotten(clock: TurnedClock) -> None:
    """Unusable keys must not stay in memory, nor fill it."""
    cache: KekCache[str, Kek] = KekCache(clock)
    in_memory: weakref.WeakSet[Kek] = weakref.WeakSet()

    def load(keys: list[str]) -> list[Kek | KmsError]:
        loaded = [Kek() for _ in keys]
        in_memory.update(loaded)
        return [*loaded]

    for number in range(100):
        assert len(cache.get_many([f"key {number}"], load, 10)) == 1
        clock.seconds += 10
    gc.collect()
    assert len(in_memory) <= 2


def test_clear(cache: KekCache[str, str], load: Loader) -> None:
    cache.get_many(["a"], load, LONG)
    cache.clear()
    cache.get_many(["a"], load, LONG)
    assert len(load.calls) == 2


# --- errors ---


def test_clear_while_loading(cache: KekCache[str, str], load: Loader) -> None:
    """A key whose access was withdrawn would otherwise outlive the call that clears the cache."""

    def cleared(keys: list[str]) -> list[str | KmsError]:
        cache.clear()
        return load(keys)

    # Not only the first time.
    for count in (1, 2):
        assert cache.get_many(["a"], cleared, LONG) == ["a!"]
        assert load.calls == [["a"]] * count
    cache.get_many(["a"], load, LONG)
    assert load.calls == [["a"]] * 3


def test_an_error_is_not_kept_and_does_not_touch_others(cache: KekCache[str, str], load: Loader) -> None:
    def half(keys: list[str]) -> list[str | KmsError]:
        return [unavailable() if key == "bad" else f"{key}!" for key in keys]

    good, bad = cache.get_many(["good", "bad"], half, LONG)
    assert good == "good!" and isinstance(bad, KmsUnavailableError)
    assert cache.get_many(["good", "bad"], load, LONG) == ["good!", "bad!"]
    assert load.calls == [["bad"]]


@pytest.mark.parametrize("error", [RuntimeError("foreign"), KeyboardInterrupt()])
def test_what_the_load_raises_is_raised_and_not_kept(
    cache: KekCache[str, str], load: Loader, error: BaseException
) -> None:
    """Otherwise, Ctrl-C in a load would leave a key loading forever, and all waiting threads would hang."""

    def raising(keys: list[str]) -> Sequence[str | KmsError]:
        raise error

    with pytest.raises(type(error)):
        cache.get_many(["a"], raising, LONG)
    assert cache.get_many(["a"], load, LONG) == ["a!"]


def test_ctrl_c_before_the_load_leaves_no_key_that_is_loading(
    cache: KekCache[str, str], load: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("parquet_keytools.telemetry.count", interrupted)
        cache.get_many(["a"], load, LONG)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(cache.get_many, ["a"], load, LONG).result(20) == ["a!"]


@pytest.mark.parametrize("answers", [[], ["a!", "b!", "c!"]])
def test_the_wrong_number_of_answers(cache: KekCache[str, str], load: Loader, answers: list[str]) -> None:
    with pytest.raises(ValueError, match="zip"):
        cache.get_many(["a", "b"], lambda _: answers, LONG)
    assert cache.get_many(["a", "b"], load, LONG) == ["a!", "b!"]


# --- threads ---


class GatedLoader(Loader):
    """Waits in its first load until all others wait for it."""

    def __init__(self, answer: str | Exception = "!") -> None:
        super().__init__()
        self.started = threading.Event()
        self.go_on = threading.Event()
        self.answer = answer

    def __call__(self, keys: list[str]) -> list[str | KmsError]:
        self.calls.append(keys)
        self.started.set()
        assert self.go_on.wait(20)
        if isinstance(self.answer, KmsError):
            return [self.answer for _ in keys]
        if isinstance(self.answer, Exception):
            raise self.answer
        return [f"{key}{self.answer}" for key in keys]


def outcomes_of_32_threads(cache: KekCache[str, str], load: GatedLoader) -> list[object]:
    """Let 32 threads miss the cache together; returns the result of each."""
    arrived = threading.Semaphore(0)

    def ask(_: int) -> object:
        arrived.release()
        try:
            return cache.get_many(["a"], load, LONG)[0]
        except (RuntimeError, KeyboardInterrupt) as error:
            return error

    with ThreadPoolExecutor(32) as pool:
        futures = [pool.submit(ask, number) for number in range(32)]
        for _ in range(32):
            assert arrived.acquire(timeout=20)
        assert load.started.wait(20)
        load.go_on.set()
        return [future.result(20) for future in futures]


def test_32_threads_one_load(cache: KekCache[str, str]) -> None:
    load = GatedLoader()
    assert outcomes_of_32_threads(cache, load) == ["a!"] * 32
    assert load.calls == [["a"]]


def test_an_error_reaches_all_who_wait_and_is_not_kept(cache: KekCache[str, str], load: Loader) -> None:
    gated = GatedLoader(unavailable())
    outcomes = outcomes_of_32_threads(cache, gated)
    assert all(isinstance(outcome, KmsUnavailableError) for outcome in outcomes)
    assert cache.get_many(["a"], load, LONG) == ["a!"]


def test_an_exception_reaches_all_who_wait(cache: KekCache[str, str], load: Loader) -> None:
    outcomes = outcomes_of_32_threads(cache, GatedLoader(RuntimeError("broken")))
    assert all(isinstance(outcome, RuntimeError) for outcome in outcomes)
    assert cache.get_many(["a"], load, LONG) == ["a!"]


def test_what_interrupts_one_thread_does_not_interrupt_those_who_wait(
    cache: KekCache[str, str],
) -> None:
    class InterruptedOnce(GatedLoader):
        def __call__(self, keys: list[str]) -> list[str | KmsError]:
            answers = super().__call__(keys)
            if len(self.calls) == 1:
                raise KeyboardInterrupt
            return answers

    load = InterruptedOnce()
    outcomes = outcomes_of_32_threads(cache, load)
    assert outcomes.count("a!") == 31
    assert sum(isinstance(outcome, KeyboardInterrupt) for outcome in outcomes) == 1
    assert load.calls == [["a"], ["a"]]


def test_crossing_sets_do_not_lock_each_other_out(cache: KekCache[str, str]) -> None:
    """Threads that each load a part and wait for the parts of others, repeatedly."""
    names = [f"key {number}" for number in range(6)]

    def ask(seed: int) -> None:
        chosen = random.Random(seed)
        for _ in range(200):
            wanted = chosen.sample(names, chosen.randint(1, 6))
            found = cache.get_many(wanted, lambda keys: [f"{key}!" for key in keys], chosen.choice([0, LONG]))
            assert found == [f"{name}!" for name in wanted]

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(ask, seed) for seed in range(8)]:
            future.result(20)


def test_waits_only_for_what_others_load(cache: KekCache[str, str], load: Loader) -> None:
    """While one thread loads a, another that wants a and b loads b itself, at once."""
    gated = GatedLoader()
    loads_b = threading.Event()

    def load_b(keys: list[str]) -> list[str | KmsError]:
        loads_b.set()
        return load(keys)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get_many, ["a"], gated, LONG)
        assert gated.started.wait(20)
        second = pool.submit(cache.get_many, ["a", "b"], load_b, LONG)
        assert loads_b.wait(20)
        assert load.calls == [["b"]]
        gated.go_on.set()
        assert (first.result(20), second.result(20)) == (["a!"], ["a!", "b!"])


# --- fork ---


def in_child(work) -> int:
    process_id = os.fork()
    if process_id == 0:
        status = 1
        try:
            status = 0 if work() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])


def test_a_forked_child_starts_empty(cache: KekCache[str, str], load: Loader) -> None:
    """Otherwise, parent and child would use one KEK, and its invocation count twice."""
    cache.get_many(["a"], load, LONG)

    def child() -> bool:
        cache.get_many(["a"], load, LONG)
        return len(load.calls) == 2

    assert in_child(child) == 0
    cache.get_many(["a"], load, LONG)
    assert len(load.calls) == 1


def test_a_child_does_not_wait_for_a_thread_that_it_does_not_have(cache: KekCache[str, str], load: Loader) -> None:
    """The parent's thread is in the middle of a load when the process forks."""
    gated = GatedLoader()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(cache.get_many, ["a"], gated, LONG)
        assert gated.started.wait(20)
        assert in_child(lambda: cache.get_many(["a"], load, LONG) == ["a!"]) == 0
        gated.go_on.set()
        assert future.result(20) == ["a!"]
