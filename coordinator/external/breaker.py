"""A circuit breaker: who fails again and again is left alone for a while, and then tried by one.

closed    everybody may ask; MOST_FAILURES in a row open it
open      nobody may, for FIRST_S, and twice as long after each trial that has failed
trying    one may ask, and the others wait until its answer begins: then one more failure opens it
"""

from __future__ import annotations

from typing import Final

from pdserve.shared.clock import Clock

MOST_FAILURES: Final = 5  # in a row
FIRST_S: Final = 1.0
LONGEST_S: Final = 60.0


class Breaker:
    """Of one server. Who may ask begins an attempt, and says how it went."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._num_failures = 0  # in a row
        self._pause_s = FIRST_S  # after the next failure that opens it
        self._next_try_s = 0.0  # while it is open
        self._trial: BreakerAttempt | None = None

    def wait_s(self) -> float:
        """Return the seconds until somebody may ask; 0: now."""
        if self._num_failures < MOST_FAILURES:
            return 0.0
        wait_s = self._next_try_s - self._clock.now()
        return max(wait_s, FIRST_S) if self._trial is not None else max(wait_s, 0.0)

    def begin(self) -> BreakerAttempt:
        """Begin an attempt, when there is nothing to wait for."""
        attempt = BreakerAttempt(self)
        if self._num_failures >= MOST_FAILURES:
            self._trial = attempt
        return attempt

    def began(self, attempt: BreakerAttempt) -> None:
        """Note that an answer has begun. Its end, which may be far away, is another matter."""
        if attempt is self._trial:
            self._trial = None
            self._num_failures = MOST_FAILURES - 1

    def ended(self, attempt: BreakerAttempt, *, worked: bool | None) -> None:
        """Note how one went; None: nobody knows. Those from before it opened tell nothing new."""
        is_open, is_trial = self._num_failures >= MOST_FAILURES, attempt is self._trial
        if is_trial:
            self._trial = None
        if worked:
            self._num_failures, self._pause_s = 0, FIRST_S
        elif worked is not None and (is_trial or not is_open):
            self._num_failures += 1
            if self._num_failures >= MOST_FAILURES:
                self._next_try_s = self._clock.now() + self._pause_s
                self._pause_s = min(LONGEST_S, 2 * self._pause_s)


class BreakerAttempt:
    """One attempt. Only what is said first of it counts."""

    def __init__(self, breaker: Breaker) -> None:
        self._breaker = breaker
        self._is_over = False

    def began(self) -> None:
        """Note the beginning of an answer."""
        if not self._is_over:
            self._breaker.began(self)

    def worked(self) -> None:
        """Note an answer."""
        self._end(worked=True)

    def failed(self) -> None:
        """Note that there was none, or not all of one."""
        self._end(worked=False)

    def left(self) -> None:
        """Note that nothing was learned: the caller did not wait."""
        self._end(worked=None)

    def _end(self, *, worked: bool | None) -> None:
        if not self._is_over:
            self._is_over = True
            self._breaker.ended(self, worked=worked)
