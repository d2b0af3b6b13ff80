"""A process that was stopped must not take its own silence for its peers'."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from pdserve.shared.clock import ManualClock
from pdserve.wire.patience import Patience, patience

LIMIT_S = 5.0


def _filled() -> socket.socket:
    """A socket with one byte to read."""
    ours, theirs = socket.socketpair()
    theirs.send(b"x")
    theirs.close()
    return ours


def ticks_until_given_up(counted: Patience, clock: ManualClock) -> int:
    for num_ticks in range(1, 100):
        clock.advance(counted.tick_s)
        if counted.tick():
            return num_ticks
    raise AssertionError("never given up")


def test_a_silent_peer_is_given_up_at_the_limit() -> None:
    clock = ManualClock()
    counted = Patience(LIMIT_S, clock)
    assert ticks_until_given_up(counted, clock) * counted.tick_s == pytest.approx(LIMIT_S)


def test_what_is_heard_begins_the_time_anew() -> None:
    clock = ManualClock()
    counted = Patience(LIMIT_S, clock)
    for _ in range(30):
        clock.advance(counted.tick_s)
        assert not counted.tick()
        counted.heard()
    assert ticks_until_given_up(counted, clock) * counted.tick_s == pytest.approx(LIMIT_S)


def test_time_in_which_the_process_was_stopped_is_not_counted() -> None:
    """Not even where a single tick was left: what is pending is read before the next one."""
    clock = ManualClock()
    counted = Patience(LIMIT_S, clock)
    for _ in range(9):
        clock.advance(counted.tick_s)
        assert not counted.tick()
    clock.advance(6.0)
    assert not counted.tick()
    assert ticks_until_given_up(counted, clock) == 1


def test_a_slightly_busy_loop_still_notices_silence() -> None:
    clock = ManualClock()
    counted = Patience(LIMIT_S, clock)
    waited_s = 0.0
    while True:
        clock.advance(counted.tick_s * 1.5)
        waited_s += counted.tick_s * 1.5
        if counted.tick():
            break
    assert waited_s <= LIMIT_S * 1.5


def test_beyond_the_limit_it_is_asked_at_each_tick_whether_to_wait_on() -> None:
    clock, asked_s = ManualClock(), list[float]()

    def waits_on(silent_s: float) -> bool:
        asked_s.append(silent_s)
        return silent_s < 2 * LIMIT_S

    counted = Patience(LIMIT_S, clock, waits_on)
    assert ticks_until_given_up(counted, clock) * counted.tick_s == pytest.approx(2 * LIMIT_S)
    assert asked_s[0] == pytest.approx(LIMIT_S)
    counted.heard()
    asked_s.clear()
    assert ticks_until_given_up(counted, clock) * counted.tick_s == pytest.approx(2 * LIMIT_S)
    assert len(asked_s) == 11


async def test_a_loop_that_stood_still_reads_what_is_pending_first() -> None:
    """The message was there all the time; only the loop was not."""
    reader, writer = await asyncio.open_connection(sock=_filled())
    async with patience(0.1):
        time.sleep(0.3)  # noqa: ASYNC251 - it is what is tested
        assert await reader.readexactly(1) == b"x"
    writer.close()


async def test_a_peer_that_says_nothing_times_out() -> None:
    with pytest.raises(TimeoutError):
        async with patience(0.05):
            await asyncio.Event().wait()
