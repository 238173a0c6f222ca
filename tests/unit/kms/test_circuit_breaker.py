import pytest
from faults import TurnedClock

from parquet_keytools.kms.call_traffic import CircuitBreaker


@pytest.fixture
def clock() -> TurnedClock:
    return TurnedClock()


@pytest.fixture
def breaker(clock: TurnedClock) -> CircuitBreaker:
    return CircuitBreaker(open_after_seconds=20, probe_every_seconds=2, clock=clock)


def fail_for(breaker: CircuitBreaker, clock: TurnedClock, seconds: int) -> list[bool]:
    outcomes = [breaker.failed()]
    for _ in range(seconds):
        clock.seconds += 1
        outcomes.append(breaker.failed())
    return outcomes


def test_closed_at_first(breaker: CircuitBreaker) -> None:
    assert not breaker.is_open()
    assert breaker.seconds_to_wait() == 0


def test_opens_after_its_time_and_says_so_once(breaker: CircuitBreaker, clock: TurnedClock) -> None:
    assert fail_for(breaker, clock, 25) == [False] * 20 + [True] + [False] * 5
    assert breaker.is_open()


def test_many_failures_at_once_do_not_open(breaker: CircuitBreaker, clock: TurnedClock) -> None:
    """A KMS that is restarted is gone for some seconds, and 32 threads see it."""
    for _ in range(1000):
        breaker.failed()
    clock.seconds += 30
    assert not breaker.is_open(), "nobody has asked it for 30 seconds"


def test_few_failures_do_not_open(breaker: CircuitBreaker, clock: TurnedClock) -> None:
    for _ in range(4):
        breaker.failed()
        clock.seconds += 10
    assert not breaker.is_open()
    breaker.failed()
    assert breaker.is_open()


def test_an_answer_in_between(breaker: CircuitBreaker, clock: TurnedClock) -> None:
    fail_for(breaker, clock, 19)
    assert breaker.answered() is False
    fail_for(breaker, clock, 19)
    assert not breaker.is_open()


def test_one_probe_at_a_time(breaker: CircuitBreaker, clock: TurnedClock) -> None:
    fail_for(breaker, clock, 20)
    assert breaker.seconds_to_wait() == 2
    clock.seconds += 1.5
    assert breaker.seconds_to_wait() == 0.5
    clock.seconds += 0.5
    assert [breaker.seconds_to_wait() for _ in range(3)] == [0, 2, 2]
    breaker.failed()
    clock.seconds += 2
    assert [breaker.seconds_to_wait() for _ in range(3)] == [0, 2, 2]


def test_a_probe_that_is_never_sent(breaker: CircuitBreaker, clock: TurnedClock) -> None:
    """Whoever took it may be interrupted: another one gets the next."""
    fail_for(breaker, clock, 20)
    for _ in range(5):
        clock.seconds += 2
        assert breaker.seconds_to_wait() == 0


def test_late_failures_do_not_put_off_the_probe(breaker: CircuitBreaker, clock: TurnedClock) -> None:
    """32 calls that were under way fail one after the other."""
    fail_for(breaker, clock, 20)
    for _ in range(20):
        clock.seconds += 0.1
        breaker.failed()
    assert breaker.seconds_to_wait() == pytest.approx(0, abs=1e-6)


def test_an_answer_closes_and_says_so_once(breaker: CircuitBreaker, clock: TurnedClock) -> None:
    fail_for(breaker, clock, 20)
    assert [breaker.answered(), breaker.answered()] == [True, False]
    assert not breaker.is_open()
    assert breaker.seconds_to_wait() == 0
    assert fail_for(breaker, clock, 20)[-1] is True, "it opens again"


def test_what_was_long_ago_is_forgotten(breaker: CircuitBreaker, clock: TurnedClock) -> None:
    """After an idle hour the first 32 threads would else fail, but for one."""
    fail_for(breaker, clock, 20)
    clock.seconds += 3600
    assert [breaker.seconds_to_wait() for _ in range(3)] == [0, 0, 0]
    assert fail_for(breaker, clock, 20)[-1] is True
