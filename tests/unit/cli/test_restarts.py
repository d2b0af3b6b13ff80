"""When processes that end are started again."""

from pdserve.clock import ManualClock
from pdserve.cluster.restarts import MOST_S, STABLE_S, Backoff


def test_the_pause_doubles_up_to_a_limit():
    backoff = Backoff(ManualClock())
    pauses = [backoff.ended() for _ in range(9)]
    assert pauses[:6] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4]
    assert pauses[6:] == [MOST_S] * 3


def test_a_minute_of_being_ready_begins_it_anew():
    clock = ManualClock()
    backoff = Backoff(clock)
    backoff.ended()
    clock.advance(10 * STABLE_S)  # it was loading all the time
    assert backoff.ended() == 0.4
    backoff.is_ready()
    clock.advance(0.9 * STABLE_S)
    assert backoff.ended() == 0.8
    backoff.is_ready()
    clock.advance(STABLE_S)
    assert backoff.ended() == 0.2
    assert backoff.ended() == 0.4
