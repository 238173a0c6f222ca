"""How many calls a KMS gets that throttles: all succeed, and most of what it allows is used."""

import threading
import time
from collections import defaultdict
from typing import Literal

import pytest
from fake_remote_kms import FakeRemoteKms, QuotaKms
from faults import TurnedClock
from virtual_time import VirtualTime

from parquet_keytools.errors import KmsThrottledError
from parquet_keytools.kms import call_traffic
from parquet_keytools.kms.call_traffic import CallRate
from parquet_keytools.kms.client import WrapRequest
from parquet_keytools.kms.remote_client import Time
from parquet_keytools.secret_bytes import SecretBytes

KEY = SecretBytes.random(128)


@pytest.fixture
def clock() -> TurnedClock:
    return TurnedClock()


def places(rate: CallRate, number: int, within_seconds: float = 1000) -> list[float | None]:
    return [rate.reserve(within_seconds) for _ in range(number)]


# --- the row ---


def test_what_happened_in_the_last_second() -> None:
    """Of the second before, as much counts as is not yet a second ago."""
    counter = call_traffic._Counter(100.0)
    for now in (100.0, 100.1, 100.5):
        counter.add(now)
    assert counter.per_second(100.5) == pytest.approx(3 / 0.5)
    assert counter.per_second(101.0) == pytest.approx(3)
    counter.add(101.2)
    assert counter.per_second(101.25) == pytest.approx(3 * 0.75 + 1)
    assert counter.per_second(102.5) == pytest.approx(1 * 0.5)
    counter.add(102.6)
    # Two seconds later nothing of it counts.
    assert counter.per_second(104.0) == counter.per_second(104.9) == 0
    counter.add(105.5)
    assert counter.per_second(105.5) == 1
    assert call_traffic._Counter(100.0).per_second(100.0) == 0


def test_no_limit(clock: TurnedClock) -> None:
    assert places(CallRate(None, clock), 1000) == [0.0] * 1000


def test_a_given_rate_is_kept_from_the_first_call_on(clock: TurnedClock) -> None:
    rate = CallRate(10, clock)
    assert places(rate, 4) == pytest.approx([0, 0.1, 0.2, 0.3])
    clock.seconds += 0.35
    assert places(rate, 2) == pytest.approx([0.05, 0.15])


def test_a_pause_is_not_made_up_for(clock: TurnedClock) -> None:
    rate = CallRate(10, clock)
    places(rate, 1)
    clock.seconds += 100
    assert places(rate, 2) == pytest.approx([0, 0.1])


def test_a_place_far_ahead_is_not_taken(clock: TurnedClock) -> None:
    """Whoever gives up would else leave holes, and the places would outlive the rate that they were made for."""
    rate = CallRate(1, clock)
    assert places(rate, 3, within_seconds=0.25) == [0, None, None]
    clock.seconds += 0.8
    assert places(rate, 2, within_seconds=0.25) == [pytest.approx(0.2), None]


def test_answers_do_not_raise_a_given_rate(clock: TurnedClock) -> None:
    rate = CallRate(10, clock)
    for _ in range(1000):
        clock.seconds += 0.1
        rate.answered()
    assert rate.calls_per_second == 10


@pytest.mark.parametrize("most", [0.1, 10])
def test_throttling_cuts_a_given_rate_and_answers_bring_it_back(clock: TurnedClock, most: float) -> None:
    rate = CallRate(most, clock)
    clock.seconds += 10
    rate.throttled()
    assert rate.calls_per_second == min(1.0, most)
    for _ in range(100):
        clock.seconds += 1
        rate.answered()
    assert rate.calls_per_second == most


# --- the KMS's own limit ---


def test_the_cut_goes_by_what_was_answered(clock: TurnedClock) -> None:
    """32 threads may ask a KMS many times what it takes: their rate says nothing about it."""
    rate = CallRate(None, clock)
    for _ in range(100):
        clock.seconds += 0.01
        places(rate, 30)
        rate.answered()
    rate.throttled()
    assert rate.calls_per_second == pytest.approx(85, rel=0.05)


def test_calls_that_were_under_way_cut_once(clock: TurnedClock) -> None:
    rate = CallRate(None, clock)
    for _ in range(100):
        clock.seconds += 0.01
        rate.answered()
    for _ in range(32):
        rate.throttled()
    assert rate.calls_per_second == pytest.approx(85, rel=0.05)


def test_growth_is_fast_where_nobody_knows_the_limit_and_slow_near_it(clock: TurnedClock) -> None:
    rate = CallRate(None, clock)
    for _ in range(100):
        clock.seconds += 0.01
        rate.answered()
    rate.throttled()

    def grown(seconds: float, before: float) -> float:
        """Return what the rate becomes by an answer after some seconds; 100 a second were too many."""
        rate._rate, rate._throttled_at = before, known
        clock.seconds += seconds
        rate.answered()
        assert rate.calls_per_second is not None
        return rate.calls_per_second

    known: float | None = None
    assert grown(0.25, 20) == pytest.approx(20 * 2**0.5)
    # A pause is not made up for.
    assert grown(2, 20) == pytest.approx(80)
    known = 100.0
    assert grown(0.25, 80) == pytest.approx(80 * 2**0.5)
    assert grown(0.5, 85) == pytest.approx(85 + 1.5)
    assert grown(0.5, 118) == pytest.approx(118 + 1.5) and rate._throttled_at == 100
    assert grown(0.5, 119) == pytest.approx(119 + 1.5) and rate._throttled_at is None


def test_a_second_cut_is_where_the_limit_is(clock: TurnedClock) -> None:
    rate = CallRate(None, clock)
    for cut in range(2):
        for _ in range(100):
            clock.seconds += 0.01
            rate.answered()
        # Of the first one nobody knows whether the limit is near.
        assert rate._throttled_at is None
        rate.throttled()
        assert (rate._throttled_at is None) == (cut == 0)
    assert rate._throttled_at == pytest.approx(100, rel=0.05)
    assert rate.calls_per_second == pytest.approx(85, rel=0.05)


def test_a_given_limit_is_never_lifted(clock: TurnedClock) -> None:
    rate = CallRate(100_000, clock)
    rate.throttled()
    for _ in range(20):
        clock.seconds += 1
        rate.answered()
        assert rate.calls_per_second is not None
    assert rate.calls_per_second == 100_000


def test_a_limit_that_is_needed_stays(clock: TurnedClock) -> None:
    rate = CallRate(None, clock)
    rate.throttled()
    for second in range(10):
        # A hundred calls a second are made: four times as many are no limit that is far away.
        rate._rate, rate._next_call = 370.0, 0.0
        for _ in range(100):
            clock.seconds += 0.01
            assert rate.reserve(10) is not None
        rate._throttled_at = 370.0
        rate.answered()
        assert rate.calls_per_second is not None, second
    rate._rate = 450.0
    rate.answered()
    assert rate.calls_per_second is None


def test_it_never_falls_to_nothing(clock: TurnedClock) -> None:
    rate = CallRate(None, clock)
    for _ in range(100):
        clock.seconds += 1
        rate.throttled()
    assert rate.calls_per_second == 1


def test_a_limit_that_nobody_needs_is_lifted(clock: TurnedClock) -> None:
    rate = CallRate(None, clock)
    rate.throttled()
    for _ in range(20):
        clock.seconds += 1
        assert rate.reserve(10) is not None
        rate.answered()
    assert rate.calls_per_second is None


def run_against(
    quota: QuotaKms, clock: VirtualTime, seconds: float, latency: float = 0.005
) -> tuple[float, float, FakeRemoteKms]:
    """Let 32 threads wrap all the time. Returns calls a second as a part of the quota, and the longest call."""
    lock = threading.Lock()

    def on_try(*_: object) -> None:
        clock.sleep(latency)
        with lock:
            quota()

    kms = FakeRemoteKms(on_try, clock.source())
    start, longest = clock(), [0.0]

    def work() -> None:
        while (began := clock()) < start + seconds:
            kms.wrap(KEY, "k")
            longest.append(clock() - began)

    clock.run([work] * 32)
    taken = sum(at < start + seconds for at in quota.taken)
    return taken / seconds / quota.per_second, max(longest), kms


@pytest.mark.parametrize("kind", ["bucket", "window"])
@pytest.mark.parametrize("per_second", [3, 10, 100, 500])
def test_32_threads_all_succeed_and_use_what_the_kms_allows(
    per_second: int, kind: Literal["bucket", "window"]
) -> None:
    clock = VirtualTime()
    quota = QuotaKms(per_second, clock, kind)
    used, longest, _ = run_against(quota, clock, seconds=40)
    assert used > 0.85
    assert longest < max(3 * 32 / per_second, 10), "one thread starved"
    assert len(quota.refused) < 0.7 * len(quota.taken)


def test_a_kms_that_allows_no_burst() -> None:
    clock = VirtualTime()
    used, _, _ = run_against(QuotaKms(100, clock, burst_seconds=0), clock, seconds=60)
    assert used > 0.7


def test_throttled_for_a_while() -> None:
    """The KMS refuses everything for 25 seconds: everybody waits, nobody fails, and then all is as before."""
    clock = VirtualTime()
    quota = QuotaKms(100, clock)
    start = clock()
    refused: list[float] = []
    lock = threading.Lock()

    def on_try(*_: object) -> None:
        clock.sleep(0.005)
        with lock:
            now = clock() - start
            if 5 <= now < 30:
                refused.append(now)
                raise KmsThrottledError(backend="fake_remote", operation="try")
            quota()

    kms = FakeRemoteKms(on_try, clock.source())

    def work() -> None:
        while clock() < start + 60:
            kms.wrap(KEY, "k")

    clock.run([work] * 32)
    assert len(refused) < 150, "32 threads asked it all the time"
    assert sum(45 <= at - start < 60 for at in quota.taken) > 0.85 * 15 * quota.per_second


def test_real_threads_and_real_time() -> None:
    pauses: dict[int, float] = defaultdict(float)

    def sleep(seconds: float) -> None:
        pauses[threading.get_ident()] += seconds
        time.sleep(seconds)

    kms = FakeRemoteKms(time_source=Time(sleep=sleep), max_calls_per_second=200)
    start = time.monotonic()
    kms.wrap_many([WrapRequest(KEY, "k") for _ in range(100)])
    assert time.monotonic() - start > 0.4
    # What each thread asked for: on a machine with much else to do it may get more.
    assert max(pauses.values()) < 3
    kms.close()
