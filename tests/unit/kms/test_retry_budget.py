import pytest
from faults import TurnedClock

from parquet_keytools.kms.call_traffic import RetryBudget


@pytest.fixture
def clock() -> TurnedClock:
    return TurnedClock()


@pytest.fixture
def budget(clock: TurnedClock) -> RetryBudget:
    return RetryBudget(burst=4, per_second=2, clock=clock)


def empty(budget: RetryBudget) -> None:
    while not budget.take():
        pass


def test_a_burst_then_little(budget: RetryBudget, clock: TurnedClock) -> None:
    assert [budget.take() for _ in range(6)] == [0, 0, 0, 0, 0.5, 0.5]
    clock.seconds += 0.5
    assert [budget.take() for _ in range(2)] == [0, 0.5]
    clock.seconds += 0.25
    assert budget.take() == 0.25


def test_asking_in_vain_costs_nothing(budget: RetryBudget, clock: TurnedClock) -> None:
    """Who gives up while waiting would else make all others wait longer."""
    empty(budget)
    for _ in range(100):
        budget.take()
    clock.seconds += 0.5
    assert budget.take() == 0


def test_each_answer_allows_one(budget: RetryBudget) -> None:
    """When the KMS is back, those who wait must not come one by one."""
    empty(budget)
    for _ in range(3):
        budget.answered()
    assert [budget.take() for _ in range(4)] == [0, 0, 0, 0.5]


def test_it_never_holds_more_than_the_burst(budget: RetryBudget, clock: TurnedClock) -> None:
    for _ in range(100):
        budget.answered()
    clock.seconds += 1000
    assert [budget.take() for _ in range(5)] == [0, 0, 0, 0, 0.5]


def test_whoever_waits_as_told_gets_one(budget: RetryBudget, clock: TurnedClock) -> None:
    empty(budget)
    for _ in range(1000):
        clock.seconds += budget.take()
        assert budget.take() == 0
