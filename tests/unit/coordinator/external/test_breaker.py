"""When a server that fails is left alone, and when it is tried again."""

from __future__ import annotations

from coordinator.external.breaker import FIRST_S, LONGEST_S, MOST_FAILURES, Breaker
from pdserve.shared.clock import ManualClock


def opened(clock: ManualClock) -> Breaker:
    breaker = Breaker(clock)
    for _ in range(MOST_FAILURES):
        assert breaker.wait_s() == 0
        breaker.begin().failed()
    return breaker


def test_failures_in_a_row_open_it() -> None:
    clock = ManualClock()
    assert opened(clock).wait_s() == FIRST_S
    breaker = Breaker(clock)
    for _ in range(MOST_FAILURES - 1):
        breaker.begin().failed()
    breaker.begin().worked()
    breaker.begin().failed()
    assert breaker.wait_s() == 0


def test_one_tries_it_again() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    clock.advance(FIRST_S)
    assert breaker.wait_s() == 0
    trial = breaker.begin()
    assert breaker.wait_s() == FIRST_S
    trial.failed()
    trial.left()
    assert breaker.wait_s() == 2 * FIRST_S
    clock.advance(2 * FIRST_S)
    breaker.begin().left()  # nobody knows
    assert breaker.wait_s() == 0
    breaker.begin().worked()
    assert breaker.wait_s() == 0
    breaker.begin().failed()
    assert breaker.wait_s() == 0


def test_an_answer_that_has_begun_ends_the_trial_but_not_all_doubt() -> None:
    """It may take minutes to its end."""
    clock = ManualClock()
    breaker = opened(clock)
    clock.advance(FIRST_S)
    trial = breaker.begin()
    trial.began()
    assert breaker.wait_s() == 0
    other = breaker.begin()
    other.began()
    trial.failed()
    assert breaker.wait_s() == 2 * FIRST_S, "one more failure is enough"
    clock.advance(2 * FIRST_S)
    last = breaker.begin()
    other.began()
    assert breaker.wait_s() == FIRST_S, "it is not the trial"
    last.began()
    last.worked()
    for _ in range(MOST_FAILURES - 1):
        breaker.begin().failed()
    assert breaker.wait_s() == 0


def test_pauses_are_bounded_and_stragglers_make_none_longer() -> None:
    clock = ManualClock()
    breaker = Breaker(clock)
    attempts = [breaker.begin() for _ in range(3 * MOST_FAILURES)]
    for attempt in attempts:
        attempt.failed()
    assert breaker.wait_s() == FIRST_S
    for _ in range(12):
        clock.advance(breaker.wait_s())
        breaker.begin().failed()
    assert breaker.wait_s() == LONGEST_S
