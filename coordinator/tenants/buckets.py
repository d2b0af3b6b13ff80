"""Token buckets: so much a minute, and a minute's worth at once."""

from __future__ import annotations

MINUTE_S = 60.0


class Bucket:
    """Fills evenly up to one minute's worth. May be overdrawn; what comes next then waits longer.

    Args:
        per_minute: its size, and what flows in each minute; 0: it never runs dry.
    """

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def resized(self, per_minute: int, now_s: float) -> Bucket:
        """A bucket of another size, from which as much has been taken."""
        bucket = Bucket(per_minute, now_s)
        bucket._level -= self.per_minute - self.level(now_s)
        return bucket

    def level(self, now_s: float) -> float:
        """What is in it; less than 0 when it is overdrawn."""
        inflow = (now_s - self._at_s) * self.per_minute / MINUTE_S
        self._level = min(self._level + inflow, float(self.per_minute))
        self._at_s = now_s
        return self._level

    def wait_s(self, amount: float, now_s: float) -> float:
        """Until there is so much in it, or as much as it can hold; 0: there is."""
        if self.per_minute == 0:
            return 0.0
        missing = min(amount, self.per_minute) - self.level(now_s)
        return max(0.0, missing * MINUTE_S / self.per_minute)

    def full_s(self, now_s: float) -> float:
        """Until it is full."""
        return self.wait_s(self.per_minute, now_s)

    def take(self, amount: float, now_s: float) -> None:
        """Out of it; a negative amount is given back."""
        self._level = min(self.level(now_s) - amount, float(self.per_minute))
