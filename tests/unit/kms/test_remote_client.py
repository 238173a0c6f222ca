"""What every KMS across a network does when it is slow, throttled, broken, down or back again."""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fake_remote_kms import FakeRemoteKms
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


# --- tries ---


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
        client(clock, script, max_tries=7).wrap(KEY, "k")
    assert len(script.tries) == caught.value.tries == tries
    assert type(caught.value) is kind
    assert ("tries in" in str(caught.value)) == (tries > 1)


def test_a_class_of_a_backend_counts_as_its_parent(clock: VirtualTime) -> None:
    class QuotaError(KmsThrottledError):
        """One of a backend."""

    script = Script(QuotaError, QuotaError)
    client(clock, script).wrap(KEY, "k")
    assert len(script.tries) == 3


@pytest.mark.parametrize("kind", [KmsResponseInvalidError, KmsThrottledError, KmsUnavailableError])
def test_what_passes_is_not_noticed(clock: VirtualTime, kind: type[KmsError]) -> None:
    kms = client(clock, Script(kind, kind))
    assert kms.unwrap(kms.wrap(KEY, "k"), "k") == KEY


def test_foreign_exceptions_are_translated_and_tried_again(clock: VirtualTime) -> None:
    script = Script(ConnectionResetError("peer"), TimeoutError("read"))
    client(clock, script).wrap(KEY, "k")
    assert len(script.tries) == 3


def test_nothing_foreign_comes_out(clock: VirtualTime) -> None:
    secret = "s.CANARY"
    for error in (ConnectionError(secret), RuntimeError(secret), ValueError(secret)):
        kms = client(clock, Script(*[error] * 60), max_tries=4)
        with pytest.raises(KmsError) as caught:
            kms.wrap(KEY, "k")
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
            kms.wrap(KEY, "k")
        assert caught.value.__context__ is None
    assert kms._traffic.get().slots._value == kms.limits.max_concurrent_calls, "slots were lost"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()])
def test_an_interruption_gives_its_slot_back(clock: VirtualTime, error: BaseException) -> None:
    def interrupted(*_: object) -> None:
        raise error

    kms = client(clock, interrupted, max_concurrent_calls=1)
    with pytest.raises(type(error)):
        kms.wrap(KEY, "k")
    kms.on_try = Script()
    kms.wrap(KEY, "k")


# --- time ---


def test_each_try_gets_its_time_and_not_more_than_is_left(clock: VirtualTime) -> None:
    seconds_given: list[float] = []

    def hang(operation: str, master_key_id: str, seconds: float) -> None:
        seconds_given.append(seconds)
        clock.sleep(seconds)
        raise TimeoutError

    start = clock()
    with pytest.raises(KmsUnavailableError):
        client(clock, hang, call_timeout_seconds=5, timeout_seconds=12).wrap(KEY, "k")
    assert seconds_given[:2] == [5, 5] and len(seconds_given) <= 3
    assert clock() - start <= 12


@pytest.mark.parametrize("kind", [KmsThrottledError, KmsUnavailableError])
def test_all_tries_end_in_time(clock: VirtualTime, kind: type[KmsError]) -> None:
    script = Script(then=kind)
    start = clock()
    with pytest.raises(kind) as caught:
        client(clock, script, timeout_seconds=30, max_tries=1000).wrap(KEY, "k")
    assert 20 < clock() - start <= 30
    assert 10 < caught.value.tries < 40


def test_pauses_double_with_full_jitter(clock: VirtualTime) -> None:
    """Without jitter all clients of a KMS that was down come back at the same time."""
    longest: dict[int, float] = Counter()
    shortest: dict[int, float] = {}
    for seed in range(300):
        own = VirtualTime(seed)
        with pytest.raises(KmsResponseInvalidError):
            client(own, Script(then=KmsResponseInvalidError)).wrap(KEY, "k")
        for place, pause in enumerate(own.slept):
            longest[place] = max(longest[place], pause)
            shortest[place] = min(shortest.get(place, 9), pause)
    assert longest == {0: pytest.approx(0.02, rel=0.1), 1: pytest.approx(0.04, rel=0.1)}
    assert max(shortest.values()) < 0.003


def test_no_pause_is_longer_than_five_seconds(clock: VirtualTime) -> None:
    with pytest.raises(KmsThrottledError):
        client(clock, Script(then=KmsThrottledError), timeout_seconds=600, max_tries=100).wrap(KEY, "k")
    assert max(clock.slept) <= 5


def test_the_kms_says_how_long_to_wait(clock: VirtualTime) -> None:
    start = clock()
    error = KmsThrottledError(backend="b", operation="wrap", retry_after_seconds=7)
    client(clock, Script(error)).wrap(KEY, "k")
    assert 7 <= clock() - start < 9


def test_a_wait_that_is_too_long_ends_the_call_at_once(clock: VirtualTime) -> None:
    start = clock()
    error = KmsThrottledError(backend="b", operation="wrap", retry_after_seconds=3600)
    with pytest.raises(KmsThrottledError) as caught:
        client(clock, Script(error)).wrap(KEY, "k")
    assert clock() - start < 1
    assert caught.value.retry_after_seconds == 3600


def test_no_turn_in_time(clock: VirtualTime) -> None:
    kms = client(clock, Script(), max_calls_per_second=0.1, timeout_seconds=3)
    kms.wrap(KEY, "k")
    with pytest.raises(KmsThrottledError, match="could not be sent in time"):
        kms.wrap(KEY, "k")
    clock.advance(10)
    kms.wrap(KEY, "k")


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
        hanging = [pool.submit(kms.wrap, KEY, "k") for _ in range(2)]
        assert begun.acquire(timeout=60) and begun.acquire(timeout=60)
        with pytest.raises(KmsError, match="2 calls were under way all the time") as caught:
            kms.wrap(KEY, "k")
        assert type(caught.value) is kind
        assert caught.value.tries == 0
        release.set()
        assert all(future.result(20) for future in hanging)
    kms.wrap(KEY, "k")


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


# --- calls within calls ---


class LoginKms(FakeRemoteKms):
    """Logs in with a call of its own while another one sends."""

    def __init__(self, on_login: Callable[..., object], *args: Any, **limits: Any) -> None:
        super().__init__(*args, **limits)
        self.on_login = on_login

    def _send(self, operation: str, master_key_id: str) -> None:
        def send(seconds: float) -> None:
            self._call("connect", None, lambda left: self.on_login("connect", "", left))
            self.on_try(operation, master_key_id, seconds)

        self._call(operation, master_key_id, send)


def test_a_login_needs_no_slot_of_its_own(clock: VirtualTime) -> None:
    """All slots may be taken by calls that need a login each: they would wait for one another."""
    kms = LoginKms(Script(), Script(), max_concurrent_calls=1, timeout_seconds=1)
    kms.wrap(KEY, "k")
    kms = LoginKms(lambda *_: time.sleep(0.01), Script(), max_concurrent_calls=4, timeout_seconds=10)
    outcomes = kms.wrap_many([WrapRequest(KEY, "k") for _ in range(40)])
    assert all(isinstance(outcome, str) for outcome in outcomes)


def test_tries_do_not_multiply(clock: VirtualTime) -> None:
    login, script = Script(then=KmsUnavailableError), Script()
    kms = LoginKms(login, script, clock.source(), max_tries=6)
    with pytest.raises(KmsUnavailableError) as caught:
        kms.wrap(KEY, "k")
    assert len(login.tries) == 6 and script.tries == []
    assert caught.value.operation == "connect"


def test_a_login_ends_when_its_call_has_to(clock: VirtualTime) -> None:
    login = Script(then=KmsUnavailableError)
    kms = LoginKms(login, Script(), clock.source(), timeout_seconds=10)
    start = clock()
    with pytest.raises(KmsUnavailableError):
        kms.wrap(KEY, "k")
    assert clock() - start <= 10


def test_a_login_gets_the_time_that_is_left_of_its_attempt(clock: VirtualTime) -> None:
    kms = client(clock, Script(), call_timeout_seconds=10)

    def send(seconds: float) -> list[float]:
        given = [seconds]
        for passed in (0, 4, 6, 1):
            clock.advance(passed)
            given.append(kms._call("connect", None, lambda left: left))
        return given

    assert kms._call("wrap", "k", send) == [10, 10, 6, 0, 0]


def test_a_call_of_another_kms_has_attempts_of_its_own(clock: VirtualTime) -> None:
    inner, outer = Script(KmsUnavailableError, KmsUnavailableError), Script()
    other = client(clock, inner)

    def on_try(*about: Any) -> None:
        outer(*about)
        other.wrap(KEY, "k")

    client(clock, on_try).wrap(KEY, "k")
    assert (len(outer.tries), len(inner.tries)) == (1, 3)


def test_the_probe_may_log_in(clock: VirtualTime) -> None:
    """The call that is let through to see whether the KMS is back must not be refused in its middle."""
    login = Script(then=KmsUnavailableError)
    kms = LoginKms(login, Script(), clock.source(), timeout_seconds=120, max_tries=1000)
    with pytest.raises(KmsUnavailableError):
        kms.wrap(KEY, "k")
    assert kms._traffic.get().breaker.is_open()
    kms.on_login = Script()
    clock.advance(5)
    kms.wrap(KEY, "k")
    assert not kms._traffic.get().breaker.is_open()


# --- down ---


def down(kms: FakeRemoteKms) -> None:
    """Let a KMS be down until the breaker is open."""
    kms.on_try = Script(then=KmsUnavailableError)
    with pytest.raises(KmsUnavailableError):
        kms.wrap(KEY, "k")
    assert kms._traffic.get().breaker.is_open()


def test_fails_fast_while_down_and_says_so(clock: VirtualTime, caplog: pytest.LogCaptureFixture) -> None:
    kms = client(clock, Script())
    with caplog.at_level(logging.WARNING):
        down(kms)
        script = kms.on_try = Script(then=KmsUnavailableError)
        start = clock()
        for _ in range(100):
            with pytest.raises(KmsUnavailableError, match="not answered for 20 seconds") as caught:
                kms.wrap(KEY, "k")
                # A probe may be due; it takes its time, and fails as the others did.
        assert script.tries == [] and clock() == start
        assert 0 < caught.value.retry_after_seconds <= 2
        assert caught.value.tries == 0
        kms.on_try = Script()
        clock.advance(2)
        kms.wrap(KEY, "k")
        kms.wrap(KEY, "k")
    assert [record.getMessage() for record in caplog.records] == [
        "fake_remote: waiting for the KMS (no answer); calls are retried for up to 60 seconds",
        "fake_remote: the KMS has not answered for 20 seconds: until it does, calls fail at once",
        "fake_remote: the KMS answers again",
    ]


@pytest.mark.parametrize("answer", [KmsAccessDeniedError, WrappedKeyInvalidError, KmsThrottledError, None])
def test_any_answer_closes_the_breaker(clock: VirtualTime, answer: type[KmsError] | None) -> None:
    kms = client(clock, Script(), max_tries=20)
    kms.limits = kms.limits.model_copy(update={"max_tries": 100})
    down(kms)
    clock.advance(2)
    kms.limits = kms.limits.model_copy(update={"max_tries": 1})
    kms.on_try = Script(answer)
    if answer is None:
        kms.wrap(KEY, "k")
    else:
        with pytest.raises(answer):
            kms.wrap(KEY, "k")
    assert not kms._traffic.get().breaker.is_open()


def test_what_is_wrong_here_says_nothing_of_the_kms(clock: VirtualTime) -> None:
    kms = client(clock, Script())
    down(kms)
    clock.advance(2)
    kms.on_try = Script(then=KmsConfigurationError)
    with pytest.raises(KmsConfigurationError):
        kms.wrap(KEY, "k")
    assert kms._traffic.get().breaker.is_open()


def test_a_restart_of_the_kms_fails_nobody() -> None:
    """Down for 15 seconds under 32 threads: all calls succeed, and it is left alone meanwhile."""
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
        while clock() < start + 60:
            kms.wrap(KEY, "k")

    clock.run([work] * 32)
    while_down = sum(10.1 <= at < 25 for at in tries)
    assert while_down < 32 + 64 + 3 * 15
    usual = sum(5 <= at < 10 for at in tries)
    assert sum(28 <= at < 33 for at in tries) > 0.8 * usual, "it took more than 3 seconds to be as before"


def test_calls_that_began_before_outlast_the_breaker() -> None:
    """Down for 40 of 60 seconds: new calls fail at once, those that wait go on when it is back."""
    clock = VirtualTime()
    start = clock()

    def on_try(*_: object) -> None:
        clock.sleep(0.005)
        if clock() - start < 40:
            raise ConnectionRefusedError

    kms = client(clock, on_try, max_tries=1000)
    late: list[float] = []

    def new() -> None:
        clock.sleep(30)
        with pytest.raises(KmsUnavailableError, match="asked again in"):
            kms.wrap(KEY, "k")
            kms.wrap(KEY, "k")
        late.append(clock() - start)

    def old() -> None:
        kms.wrap(KEY, "k")
        assert 40 <= clock() - start < 45

    clock.run([old] * 8 + [new])
    assert late[0] < 45


@pytest.mark.parametrize("part_that_fails", [1.0, 0.9, 0.5])
def test_a_broken_kms_gets_little_more_than_twice_its_load(part_that_fails: float) -> None:
    """60 callers that call every 10 seconds, whatever becomes of it, for two minutes.

    Each answer allows one retry, two for each call at a time are there at first, and two come every second.
    """
    clock = VirtualTime()
    start = clock()
    tries = [0]
    answers = [0]
    random = Time().uniform
    lock = threading.Lock()

    def on_try(*_: object) -> None:
        clock.sleep(0.005)
        with lock:
            tries[0] += 1
        if random(0, 1) < part_that_fails:
            raise ConnectionResetError
        with lock:
            answers[0] += 1

    kms = client(clock, on_try, timeout_seconds=10, fail_fast_after_seconds=1e6, max_concurrent_calls=16)
    calls = [0]

    def work() -> None:
        clock.sleep(random(0, 10))
        while (began := clock()) < start + 120:
            with lock:
                calls[0] += 1
            kms.wrap_many([WrapRequest(KEY, "k")])
            clock.sleep(max(0, began + 10 - clock()))

    clock.run([work] * 60)
    assert tries[0] - calls[0] <= answers[0] + 2 * 16 + 2 * (clock() - start)
    assert calls[0] >= 60 * 11


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
def test_the_rest_of_a_task_fails_when_nothing_was_answered_for_long(kind: type[KmsError]) -> None:
    """3,000 calls that wait 60 seconds each, 32 at a time, would end after an hour and a half."""
    kms = FakeRemoteKms(Script(then=kind), max_concurrent_calls=4, timeout_seconds=0.6, call_timeout_seconds=0.1)
    start = time.monotonic()
    outcomes = kms.wrap_many([WrapRequest(KEY, "k") for _ in range(500)])
    # Of 500 calls that each take 0.6 seconds, 4 at a time, the last would end after 75.
    assert time.monotonic() - start < 20
    assert all(isinstance(outcome, kind) for outcome in outcomes)
    assert any("not tried" in str(outcome) for outcome in outcomes)
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


def test_an_interruption_wakes_those_who_pause() -> None:
    """Python waits for its threads before it ends: one that pauses for a minute would hold it up."""
    begun = threading.Event()

    def on_try(operation: str, master_key_id: str, seconds: float) -> None:
        if master_key_id == "interrupted":
            assert begun.wait(20)
            raise KeyboardInterrupt
        begun.set()
        raise KmsThrottledError(backend="b", operation="wrap", retry_after_seconds=30)

    kms = FakeRemoteKms(on_try, max_concurrent_calls=8)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        kms.wrap_many([WrapRequest(KEY, "interrupted"), *(WrapRequest(KEY, "k") for _ in range(20))])
    kms._traffic.get().concurrent_calls._pool.shutdown(wait=True)
    assert time.monotonic() - start < 15


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
    """A child has neither the parent's threads nor its slots, and uses the client all the same."""
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
