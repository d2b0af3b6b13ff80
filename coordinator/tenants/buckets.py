"""Token buckets with a rate per minute, and a burst of one minute's worth."""

from __future__ import annotations

MINUTE_S = 60.0


class Bucket:
    """Refills at a constant rate up to one minute's worth.

    It may be overdrawn; later requests then wait longer.

    Args:
        per_minute: its capacity, and the amount refilled per minute; 0: unlimited.
    """

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def resized(self, per_minute: int, now_s: float) -> Bucket:
        """Return a bucket of another size with the same amount missing.

        Nothing is missing from an unlimited one.
        """
        bucket = Bucket(per_minute, now_s)
        bucket.take(self.missing(now_s), now_s)
        return bucket

    def level(self, now_s: float) -> float:
        """Return the current level; negative if it is overdrawn."""
        inflow = (now_s - self._at_s) * self.per_minute / MINUTE_S
        self._level = min(self._level + inflow, float(self.per_minute))
        self._at_s = now_s
        return self._level

    def missing(self, now_s: float) -> float:
        """Return how much is missing until it is full."""
        return self.per_minute - self.level(now_s)

    def wait_s(self, amount: float, now_s: float) -> float:
        """Return the seconds until the level reaches `amount`, or the capacity if that is less."""
        if self.per_minute == 0:
            return 0.0
        missing = min(amount, self.per_minute) - self.level(now_s)
        return max(0.0, missing * MINUTE_S / self.per_minute)

    def full_s(self, now_s: float) -> float:
        """Return the seconds until it is full."""
        return self.wait_s(self.per_minute, now_s)

    def take(self, amount: float, now_s: float) -> None:
        """Take an amount out; a negative amount is put back."""
        if self.per_minute:
            self._level = min(self.level(now_s) - amount, float(self.per_minute))
