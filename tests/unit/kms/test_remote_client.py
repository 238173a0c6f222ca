"""The behaviour of every remote KMS when it is slow, throttled, broken, down or back again."""

from __future__ import annotations

import contextvars
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
from fake_remote_kms import FakeRemoteKms, QuotaKms
from virtual_time import VirtualTime

from parquet_keytools.errors import (
    KmsAccessDeniedError,
    KmsConfigurationError,
    KmsError,
    KmsResponseInvalidError,
    KmsThrottledError,
    KmsUnavailableError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
    WrappedKeyInvalidError,
)
from parquet_keytools.kms.client import UnwrapRequest, WrapRequest
from parquet_keytools.kms.contract_tests import unwrap_one, wrap_one
from parquet_keytools.kms.remote_client import Time
from parquet_keytools.secret_bytes import SecretBytes

KEY = SecretBytes.random(128)


class Script:
    """Raises one outcome after the other; None is an answer."""

    def __init__(self, *outcomes: type[KmsError] | Exception | None, then: type[KmsError] | None = None) -> None:
        self._outcomes = iter(outcomes)
        self._then = then
        self._lock = threading.Lock()
        self.tries: list[tuple[str, str, float]] = []

    def __call__(self, operation: str, master_key_id: str, seconds: float) -> None:
        with self._lock:
            self.tries.append((operation, master_key_id, seconds))
            outcome = next(self._outcomes, self._then)
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is not None:
            raise outcome(backend="fake_remote", operation=operation, master_key_id=master_key_id)


@pytest.fixture
def clock() -> VirtualTime:
    return VirtualTime()


def client(clock: VirtualTime, on_try: Callable[..., object], **limits: Any) -> FakeRemoteKms:
    return FakeRemoteKms(on_try, clock.source(), **limits)


# --- attempts ---


@pytest.mark.parametrize(
    ("kind", "tries"),
    [
        (KmsAccessDeniedError, 1),
        (MasterKeyNotFoundError, 1),
        (MasterKeyDisabledError, 1),
        (WrappedKeyInvalidError, 1),
        (KmsConfigurationError, 1),
        (KmsResponseInvalidError, 3),
        (KmsThrottledError, 7),
        (KmsUnavailableError, 7),
    ],
)
def test_each_class_has_its_number_of_tries(clock: VirtualTime, kind: type[KmsError], tries: int) -> None:
    script = Script(then=kind)
    with pytest.raises(kind) as caught:
        wrap_one(client(clock, script, max_tries=7), KEY, "k")
    assert len(script.tries) == caught.value.tries == tries
    assert type(caught.value) is kind
    assert ("tries in" in str(caught.value)) == (tries > 1)


def test_a_class_of_a_backend_counts_as_its_parent(clock: VirtualTime) -> None:
    class QuotaError(KmsThrottledError):
        """An error of a backend."""

    script = Script(QuotaError, QuotaError)
    wrap_one(client(clock, script), KEY, "k")
    assert len(script.tries) == 3


@pytest.mark.parametrize("kind", [KmsResponseInvalidError, KmsThrottledError, KmsUnavailableError])
def test_what_passes_is_not_noticed(clock: VirtualTime, kind: type[KmsError]) -> None:
    kms = client(clock, Script(kind, kind))
    assert unwrap_one(kms, wrap_one(kms, KEY, "k"), "k") == KEY


def test_foreign_exceptions_are_translated_and_tried_again(clock: VirtualTime) -> None:
    script = Script(ConnectionResetError("peer"), TimeoutError("read"))
    wrap_one(client(clock, script), KEY, "k")
    assert len(script.tries) == 3


def test_nothing_foreign_comes_out(clock: VirtualTime) -> None:
    secret = "s.CANARY"
    for error in (ConnectionError(secret), RuntimeError(secret), ValueError(secret)):
        kms = client(clock, Script(*[error] * 60), max_tries=4)
        with pytest.raises(KmsError) as caught:
            wrap_one(kms, KEY, "k")
        frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
        locals_of_ours = [frame.f_locals for frame in frames if "parquet_keytools" in frame.f_code.co_filename]
        printed = "".join(traceback.format_exception(caught.value)) + repr(locals_of_ours)
        assert locals_of_ours and secret not in printed + str(pickle.dumps(caught.value))
        assert caught.value.__cause__ is None and caught.value.__context__ is None


def test_a_translation_that_raises(clock: VirtualTime, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> KmsError:
        raise KeyError("s.CANARY")

    monkeypatch.setattr(FakeRemoteKms, "_translate", broken)
    kms = client(clock, Script(*[OSError("x")] * 160), max_tries=4)
    for _ in range(40):
        with pytest.raises(KmsUnavailableError) as caught:
            wrap_one(kms, KEY, "k")
        assert caught.value.__context__ is None
    together = threading.Barrier(kms.limits.max_concurrent_calls)
    kms.on_try = lambda *_: together.wait(60)  # breaks if slots were lost
    assert len(kms.wrap_many([WrapRequest(KEY, "k") for _ in range(together.parties)])) == together.parties


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()])
def test_an_interruption_gives_its_slot_back(clock: VirtualTime, error: BaseException) -> None:
    def interrupted(*_: object) -> None:
        raise error

    kms = client(clock, interrupted, max_concurrent_calls=1)
    with pytest.raises(type(error)):
        wrap_one(kms, KEY, "k")
    kms.on_try = Script()
    wrap_one(kms, KEY, "k")


# --- time ---


def test_each_try_gets_its_time_and_not_more_than_is_left(clock: VirtualTime) -> None:
    seconds_given: list[float] = []

    def hang(operation: str, master_key_id: str, seconds: float) -> None:
        seconds_given.append(seconds)
        clock.sleep(seconds)
        raise TimeoutError

    start = clock()
    with pytest.raises(KmsUnavailableError):
        wrap_one(client(clock, hang, call_timeout_seconds=5, timeout_seconds=12), KEY, "k")
    assert seconds_given[:2] == [5, 5] and len(seconds_given) <= 3
    assert clock() - start <= 12


@pytest.mark.parametrize("kind", [KmsThrottledError, KmsUnavailableError])
def test_all_tries_end_in_time(clock: VirtualTime, kind: type[KmsError]) -> None:
    script = Script(then=kind)
    start = clock()
    with pytest.raises(kind) as caught:
        wrap_one(client(clock, script, timeout_seconds=30, max_tries=1000), KEY, "k")
    assert 20 < clock() - start <= 30
    assert 10 < caught.value.tries < 40


def test_pauses_double_with_full_jitter(clock: VirtualTime) -> None:
    """Without jitter, all clients of a KMS that was down come back at the same time."""
    longest: dict[int, float] = Counter()
    shortest: dict[int, float] = {}
    for seed in range(300):
        own = VirtualTime(seed)
        with pytest.raises(KmsResponseInvalidError):
            wrap_one(client(own, Script(then=KmsResponseInvalidError)), KEY, "k")
        for place, pause in enumerate(own.slept):
            longest[place] = max(longest[place], pause)
            shortest[place] = min(shortest.get(place, 9), pause)
    assert longest == {0: pytest.approx(0.02, rel=0.1), 1: pytest.approx(0.04, rel=0.1)}
    assert max(shortest.values()) < 0.003


def test_no_pause_is_longer_than_five_seconds(clock: VirtualTime) -> None:
    with pytest.raises(KmsThrottledError):
        wrap_one(client(clock, Script(then=KmsThrottledError), timeout_seconds=600, max_tries=100), KEY, "k")
    assert max(clock.slept) <= 5


def test_the_kms_says_how_long_to_wait(clock: VirtualTime) -> None:
    start = clock()
    error = KmsThrottledError(backend="b", operation="wrap", retry_after_seconds=7)
    wrap_one(client(clock, Script(error)), KEY, "k")
    assert 7 <= clock() - start < 9


def test_a_wait_that_is_too_long_ends_the_call_at_once(clock: VirtualTime) -> None:
    start = clock()
    error = KmsThrottledError(backend="b", operation="wrap", retry_after_seconds=3600)
    with pytest.raises(KmsThrottledError) as caught:
        wrap_one(client(clock, Script(error)), KEY, "k")
    assert clock() - start < 1
    assert caught.value.retry_after_seconds == 3600


def test_no_turn_in_time(clock: VirtualTime) -> None:
    kms = client(clock, Script(), max_calls_per_second=0.1, timeout_seconds=3)
    wrap_one(kms, KEY, "k")
    with pytest.raises(KmsThrottledError, match="could not be sent in time"):
        wrap_one(kms, KEY, "k")
    clock.advance(10)
    wrap_one(kms, KEY, "k")


@pytest.mark.parametrize("kind", [KmsUnavailableError, KmsThrottledError, KmsResponseInvalidError])
@pytest.mark.parametrize("limits", [{"max_calls_per_second": 0.1, "timeout_seconds": 3}, {"timeout_seconds": 0.3}])
def test_a_deadline_that_ends_between_two_attempts_keeps_the_last_failure(
    clock: VirtualTime, limits: dict[str, Any], kind: type[KmsError]
) -> None:
    def sleep(seconds: float) -> None:
        clock.sleep(seconds + 0.3)  # the machine is busy

    script = Script(*[kind("the last failure", backend="b", operation="wrap")] * 9)
    kms = FakeRemoteKms(script, Time(clock, sleep, lambda _, longest: longest), **limits)
    with pytest.raises(kind, match="the last failure") as caught:
        wrap_one(kms, KEY, "k")
    assert caught.value.tries == len(script.tries) == 1


@pytest.mark.parametrize(("rate", "kind"), [(None, KmsUnavailableError), (1000, KmsThrottledError)])
def test_all_slots_taken_by_a_kms_that_hangs(rate: float | None, kind: type[KmsError]) -> None:
    release, begun = threading.Event(), threading.Semaphore(0)
    kms = FakeRemoteKms(
        lambda *_: (begun.release(), release.wait(60)),
        max_concurrent_calls=2,
        timeout_seconds=0.5,
        max_calls_per_second=rate,
    )
    with ThreadPoolExecutor(2) as pool:
        hanging = [pool.submit(wrap_one, kms, KEY, "k") for _ in range(2)]
        assert begun.acquire(timeout=60) and begun.acquire(timeout=60)
        with pytest.raises(KmsError, match="2 calls were under way all the time") as caught:
            wrap_one(kms, KEY, "k")
        assert type(caught.value) is kind
        assert caught.value.tries == 0
        release.set()
        assert all(future.result(20) for future in hanging)
    wrap_one(kms, KEY, "k")


def test_never_more_calls_at_a_time_than_allowed() -> None:
    lock = threading.Lock()
    under_way, most = [0], [0]

    def on_try(*_: object) -> None:
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        time.sleep(0.002)
        with lock:
            under_way[0] -= 1

    kms = FakeRemoteKms(on_try, max_concurrent_calls=5)
    requests = [WrapRequest(KEY, "k") for _ in range(60)]
    with ThreadPoolExecutor(16) as pool:
        for outcomes in pool.map(lambda _: kms.wrap_many(requests), range(16)):
            assert all(isinstance(outcome, str) for outcome in outcomes)
    assert most == [5]
    kms.close()


# --- down, and throttled ---


@pytest.mark.parametrize("kind", [KmsThrottledError, KmsUnavailableError])
def test_each_call_waits_for_a_kms_that_is_down(clock: VirtualTime, kind: type[KmsError]) -> None:
    """docs/operations.md: no state records that the KMS is down, so the first call after it is back succeeds."""
    kms = client(clock, Script(then=kind), timeout_seconds=10, max_tries=1000)
    for _ in range(3):
        start = clock()
        with pytest.raises(kind):
            wrap_one(kms, KEY, "k")
        assert 4 < clock() - start <= 10
    kms.on_try = Script()
    start = clock()
    wrap_one(kms, KEY, "k")
    assert clock() == start


def test_says_once_that_it_waits(clock: VirtualTime, caplog: pytest.LogCaptureFixture) -> None:
    kms = client(clock, Script(then=KmsUnavailableError))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with pytest.raises(KmsUnavailableError):
                wrap_one(kms, KEY, "k")
        expected = "fake_remote: waiting for the KMS (no answer); calls are retried for up to 60 seconds"
        assert [record.getMessage() for record in caplog.records] == [expected]
        kms.on_try = Script(None, then=KmsUnavailableError)
        wrap_one(kms, KEY, "k")
        with pytest.raises(KmsUnavailableError):
            wrap_one(kms, KEY, "k")
        assert [record.getMessage() for record in caplog.records] == [expected] * 2


def test_a_restart_of_the_kms_fails_no_call() -> None:
    """Down for 15 seconds under 12 threads."""
    clock = VirtualTime()
    start = clock()
    tries: list[float] = []
    lock = threading.Lock()

    def on_try(*_: object) -> None:
        clock.sleep(0.05)
        now = clock() - start
        with lock:
            tries.append(now)
        if 10 <= now < 25:
            raise ConnectionRefusedError

    kms = client(clock, on_try)

    def work() -> None:
        while clock() < start + 40:
            wrap_one(kms, KEY, "k")

    clock.run([work] * 12)
    usual = sum(5 <= at < 10 for at in tries)
    assert sum(15 <= at < 20 for at in tries) < 0.1 * usual, "calls back off while the KMS is down"
    assert sum(31 <= at < 36 for at in tries) > 0.8 * usual, "it took more than 6 seconds to be as before"


def test_calls_are_spaced() -> None:
    """32 threads, and a quota of 10 calls a second: no call is throttled by the KMS."""
    clock = VirtualTime()
    quota = QuotaKms(10.01, clock, burst_seconds=0.1)
    kms = client(clock, lambda *_: quota(), max_calls_per_second=10)
    clock.run([lambda: [wrap_one(kms, KEY, "k") for _ in range(10)]] * 32)  # type: ignore[list-item]
    assert len(quota.taken) == 320 and not quota.refused
    assert quota.taken[-1] - quota.taken[0] == pytest.approx(31.9, rel=0.01)


@pytest.mark.parametrize("kind", ["bucket", "window"])
def test_throttled_calls_all_succeed(kind: Literal["bucket", "window"]) -> None:
    clock = VirtualTime()
    quota = QuotaKms(50, clock, kind)

    def on_try(*_: object) -> None:
        clock.sleep(0.01)
        quota()

    kms = client(clock, on_try)
    clock.run([lambda: [wrap_one(kms, KEY, "k") for _ in range(20)]] * 32)  # type: ignore[list-item]
    assert len(quota.taken) == 640


# --- one deadline for an operation ---


def test_the_deadline_is_that_of_the_operation_and_not_of_each_key() -> None:
    """3,000 calls that wait 60 seconds each, 32 at a time, would end after an hour and a half."""
    tried: list[str] = []

    def hang(operation: str, master_key_id: str, seconds: float) -> None:
        tried.append(master_key_id)
        time.sleep(seconds)
        raise TimeoutError

    kms = FakeRemoteKms(hang, max_concurrent_calls=4, timeout_seconds=0.6, call_timeout_seconds=0.1)
    start = time.monotonic()
    outcomes = kms.wrap_many([WrapRequest(KEY, f"k{number}") for number in range(3000)])
    assert time.monotonic() - start < 15
    assert all(isinstance(outcome, KmsUnavailableError) for outcome in outcomes)
    assert len(set(tried)) < 100
    kms.close()


def test_answers_move_the_deadline() -> None:
    """A rotation of many keys may take longer than the timeout of the KMS."""
    kms = FakeRemoteKms(lambda *_: time.sleep(0.05), max_concurrent_calls=2, timeout_seconds=1)
    outcomes = kms.wrap_many([WrapRequest(KEY, "k") for _ in range(60)])
    assert all(isinstance(outcome, str) for outcome in outcomes)
    kms.close()


def test_a_small_operation_does_not_wait_for_a_large_one() -> None:
    begun, small_ended = threading.Event(), threading.Event()
    kms = FakeRemoteKms(lambda *_: (begun.set(), time.sleep(0.02)), max_concurrent_calls=4)
    large: list[object] = []

    def work() -> None:
        large.extend(kms.wrap_many([WrapRequest(KEY, "k") for _ in range(600)]))

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(60)
    assert len(kms.wrap_many([WrapRequest(KEY, "k") for _ in range(3)])) == 3
    small_ended.set()
    assert thread.is_alive() and not large
    thread.join(60)
    assert len(large) == 600
    kms.close()


def test_each_call_has_the_context_of_its_caller() -> None:
    variable = contextvars.ContextVar("variable", default=0)
    seen: list[tuple[str, int]] = []
    kms = FakeRemoteKms(lambda _, master_key_id, __: seen.append((master_key_id, variable.get())))

    def work(value: int) -> None:
        variable.set(value)
        kms.wrap_many([WrapRequest(KEY, str(value)) for _ in range(20)])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(1, 40)))
    assert len(seen) == 39 * 20 and all(name == str(value) for name, value in seen)
    kms.close()


# --- many ---


def test_many_are_asked_concurrently_each_distinct_one_once() -> None:
    script = Script()

    lock = threading.Lock()
    under_way: set[int] = set()
    most: list[int] = []

    def slow(*arguments: Any) -> None:
        with lock:
            under_way.add(threading.get_ident())
            most.append(len(under_way))
        time.sleep(0.02)
        with lock:
            under_way.remove(threading.get_ident())
        script(*arguments)

    kms = FakeRemoteKms(slow)
    wrapped = [kms_text(number) for number in range(300)]
    requests = [UnwrapRequest(wrapped[number % 300], f"k{number % 3}") for number in range(3000)]
    outcomes = kms.unwrap_many(requests)
    assert 10 < max(most) <= kms.limits.max_concurrent_calls
    assert [outcome.reveal() for outcome in outcomes if isinstance(outcome, SecretBytes)] == [
        f"{number % 300:016d}".encode() for number in range(3000)
    ]
    assert len(script.tries) == 300 == kms.call_counts["unwrap"]
    kms.close()


def kms_text(number: int) -> str:
    import base64

    return base64.b64encode(f"{number:016d}".encode()).decode()


def test_each_has_its_own_outcome() -> None:
    def on_try(operation: str, master_key_id: str, seconds: float) -> None:
        if master_key_id == "k1":
            raise KmsAccessDeniedError(backend="b", operation=operation, master_key_id=master_key_id)

    outcomes = FakeRemoteKms(on_try).wrap_many([WrapRequest(KEY, f"k{number % 3}") for number in range(90)])
    for number, outcome in enumerate(outcomes):
        assert isinstance(outcome, KmsAccessDeniedError if number % 3 == 1 else str)


@pytest.mark.parametrize("kind", [KmsThrottledError, KmsUnavailableError])
def test_the_rest_of_a_list_fails_when_nothing_was_answered_for_long(kind: type[KmsError]) -> None:
    kms = FakeRemoteKms(Script(then=kind), max_concurrent_calls=4, timeout_seconds=0.6, call_timeout_seconds=0.1)
    outcomes = kms.wrap_many([WrapRequest(KEY, "k") for _ in range(500)])
    assert all(isinstance(outcome, kind) for outcome in outcomes)
    assert any(
        "not attempted" in str(outcome) and outcome.tries == 0 for outcome in outcomes if isinstance(outcome, kind)
    )
    kms.on_try = Script()
    assert isinstance(kms.wrap_many([WrapRequest(KEY, "k")] * 2)[0], str)
    kms.close()


def test_a_single_failure_does_not_end_a_task() -> None:
    def on_try(operation: str, master_key_id: str, seconds: float) -> None:
        if master_key_id == "bad":
            raise ConnectionResetError

    kms = FakeRemoteKms(on_try, max_tries=2, max_concurrent_calls=2)
    outcomes = kms.wrap_many([WrapRequest(KEY, "bad" if number == 3 else "k") for number in range(50)])
    assert [number for number, outcome in enumerate(outcomes) if isinstance(outcome, KmsError)] == [3]
    kms.close()


def test_an_interruption_ends_calls_that_pause() -> None:
    """Python waits for its threads before it ends, and a thread that pauses for a minute would delay it."""
    program = """
import os, time
from fake_remote_kms import FakeRemoteKms, QuotaKms
from parquet_keytools.errors import KmsThrottledError
from parquet_keytools.kms.client import WrapRequest
from parquet_keytools.secret_bytes import SecretBytes
def on_try(*_):
    os.write(1, b"tried\\n")
    raise KmsThrottledError(backend="b", operation="wrap", retry_after_seconds=40)
try:
    FakeRemoteKms(on_try).wrap_many([WrapRequest(SecretBytes(bytes(16)), "k") for _ in range(200)])
except KeyboardInterrupt:
    os.write(1, b"interrupted\\n")
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "tried\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    assert "interrupted" in process.stdout.read()
    assert process.wait(60) == 0
    process.stdout.close()
    assert time.monotonic() - start < 30


# --- processes and the end ---


def test_after_close_all_works_anew() -> None:
    kms = FakeRemoteKms()
    for _ in range(3):
        assert len(kms.wrap_many([WrapRequest(KEY, "k") for _ in range(10)])) == 10
        kms.close()
        kms.close()


def test_close_does_not_disturb_others() -> None:
    kms = FakeRemoteKms(lambda *_: time.sleep(0.005))
    requests = [WrapRequest(KEY, "k") for _ in range(100)]
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(kms.wrap_many, requests) for _ in range(8)]
        for _ in range(10):
            time.sleep(0.01)
            kms.close()
        for future in futures:
            assert all(isinstance(outcome, str) for outcome in future.result(30))
    kms.close()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_in_the_middle() -> None:
    """A child has neither the parent's threads nor its slots, and can still use the client."""
    go_on, begun = threading.Event(), threading.Semaphore(0)
    kms = FakeRemoteKms(lambda *_: (begun.release(), go_on.wait(60)), max_concurrent_calls=2)
    requests = [WrapRequest(KEY, "k") for _ in range(10)]
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(kms.wrap_many, requests) for _ in range(2)]
        assert begun.acquire(timeout=60) and begun.acquire(timeout=60)
        child = os.fork()
        if child == 0:
            kms.on_try = lambda *_: None
            outcomes = kms.wrap_many(requests)
            os._exit(0 if all(isinstance(outcome, str) for outcome in outcomes) else 1)
        assert os.waitpid(child, 0)[1] == 0
        go_on.set()
        for future in futures:
            assert all(isinstance(outcome, str) for outcome in future.result(20))
    kms.close()
