"""The memory for request bodies, from their first byte until their call is planned.

A payer (a tenant; without keys an address) holds at most half of it, so nobody alone can keep
others out. A body for which there is no space first ends slow senders: of the payer's own bodies
where that payer holds too much, else of the payer that holds most. Then it waits, unread, for a
bounded time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from pdserve.shared.clock import Clock
from pdserve.shared.errors import BuffersFull

WAIT_S = 5.0  # for space
SLOW_S = 1.0  # without progress, after which a sender is slow
FULL = "requests that are being read fill the memory for them; try again later"
SLOW = "the body arrived too slowly while others needed the memory for it; try again later"
_PROGRESS_BYTES = 2**16


class Body:
    """What one request or connection holds of the budget; `release` gives it back."""

    def __init__(self, budget: BodyBudget, payer: str) -> None:
        self._budget = budget
        self._end: Callable[[], None] | None = None  # stops the sender; None: all has arrived
        self.payer = payer
        self.num_bytes = 0
        self.is_waiting = self.was_ended = self.is_over = False
        self.progress_s = budget.clock.now()
        self._num_since = 0  # bytes since then
        self._measure: Callable[[], int] | None = None

    async def take(self, num_bytes: int) -> None:
        """Count bytes that have arrived. Raises BuffersFull: no space, or the sender was slow."""
        if not self.try_take(num_bytes):
            await self._budget.wait_for_space(self, num_bytes)

    async def take_most(self, num_bytes: int) -> None:
        """As `take`; but what a payer may hold is always enough."""
        await self.take(max(0, min(num_bytes, self._budget.share_bytes - self.num_bytes)))

    def try_take(self, num_bytes: int) -> bool:
        """Count bytes that have arrived if there is space for them now."""
        if self.is_over or not self._budget.has_space(self, num_bytes):
            return False
        self.add(num_bytes)
        return True

    def add(self, num_bytes: int) -> None:
        """Count bytes for which there is space, or give some back where negative."""
        num_bytes = max(num_bytes, -self.num_bytes)
        self.num_bytes += num_bytes
        self._num_since += abs(num_bytes)
        if self._num_since >= _PROGRESS_BYTES:
            self.progress_s, self._num_since = self._budget.clock.now(), 0
        self._budget.count(self, num_bytes)

    def measured_by(self, measure: Callable[[], int]) -> None:
        """Let `measure` say what it holds, whenever others need space."""
        self._measure = measure

    def recount(self) -> None:
        """Count what it holds by now, if that is measured; may be more than there is space for."""
        if self._measure is not None:
            self.add(self._measure() - self.num_bytes)

    def may_end(self, end: Callable[[], None]) -> None:
        """Have `end` called if the sender is slow and others need the space."""
        self._end = end

    def arrived(self) -> None:
        """Note that nothing more is to come: its sender cannot be slow any more."""
        self._end = None

    def end(self) -> None:
        """End the slow sender."""
        assert self._end is not None
        self.was_ended = True
        self._end()
        self.release()

    def release(self) -> None:
        """Give everything back, and get nothing any more. May be called again."""
        self.is_over = True
        self._end = self._measure = None
        self.add(-self.num_bytes)

    @property
    def can_end(self) -> bool:
        """Whether more is to come of what it holds, and it is up to the sender when."""
        return self._end is not None and self.num_bytes > 0 and not self.is_waiting


class BodyBudget:
    """The bytes that all bodies hold together. Used on one event loop.

    `full` says so to who is refused; `spares` others that are not slow, however much they hold.
    """

    def __init__(
        self,
        total_bytes: int,
        clock: Clock,
        full: str = FULL,
        *,
        spares: bool = False,
        wait_s: float = WAIT_S,
        slow_s: float = SLOW_S,
    ) -> None:
        self.clock = clock
        self._full = full
        self._spares = spares
        self._wait_s = wait_s
        self._slow_s = slow_s
        self._total_bytes = total_bytes
        self.share_bytes = total_bytes // 2
        self._num_bytes: Counter[str] = Counter()  # by payer; none without bytes
        self._bodies: dict[str, set[Body]] = {}  # those that hold bytes, by payer
        self._in_total = 0
        self._waiting: dict[asyncio.Future[None], tuple[Body, int]] = {}  # in order

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return self._in_total

    def body(self, payer: str) -> Body:
        """Return a new body of this payer."""
        return Body(self, payer)

    def has_space(self, body: Body, num_bytes: int) -> bool:
        """Whether there is space, after slow senders have been ended if need be."""
        if self._fits(body, num_bytes):
            return True
        self._recount()
        if self._fits(body, num_bytes):
            return True
        for slow in self._slow(body, num_bytes):
            slow.end()
            if self._fits(body, num_bytes):
                return True
        return False

    async def wait_for_space(self, body: Body, num_bytes: int) -> None:
        """Wait until there is space, and count the bytes. Raises BuffersFull."""
        space = asyncio.get_running_loop().create_future()
        self._waiting[space] = body, num_bytes
        body.is_waiting = True
        try:
            async with asyncio.timeout(self._wait_s):
                await space
        except TimeoutError:
            # By now, others may be slow; and the space may have been given in this very moment.
            if space.cancelled() and not body.try_take(num_bytes):
                raise BuffersFull(self._full) from None
        finally:
            body.is_waiting = False
            self._waiting.pop(space, None)

    def count(self, body: Body, num_bytes: int) -> None:
        """Add to what a body holds; what is given back goes to those who wait."""
        self._in_total += num_bytes
        self._num_bytes[body.payer] += num_bytes
        mine = self._bodies.setdefault(body.payer, set())
        (mine.add if body.num_bytes else mine.discard)(body)
        if not mine:
            del self._bodies[body.payer], self._num_bytes[body.payer]
        if num_bytes < 0:
            self._pass_on()

    def _recount(self) -> None:
        for bodies in list(self._bodies.values()):
            for body in list(bodies):
                body.recount()

    def _pass_on(self) -> None:
        for space, (body, num_bytes) in list(self._waiting.items()):
            if not (space.done() or body.is_over) and self._fits(body, num_bytes):
                del self._waiting[space]
                body.add(num_bytes)
                space.set_result(None)

    def _fits(self, body: Body, num_bytes: int) -> bool:
        return (
            self._in_total + num_bytes <= self._total_bytes
            and self._num_bytes[body.payer] + num_bytes <= self.share_bytes
        )

    def _slow(self, body: Body, num_bytes: int) -> list[Body]:
        """Return whom to end for this body: first whose bytes have waited most for the others."""
        most = max(self._num_bytes, key=self._num_bytes.__getitem__, default=body.payer)
        if self._num_bytes[body.payer] + num_bytes > self.share_bytes:
            most = body.payer
        now_s = self.clock.now()
        least_s = self._slow_s if self._spares or most == body.payer else 0.0
        found = [
            other
            for other in self._bodies.get(most, ())
            if other is not body and other.can_end and now_s - other.progress_s >= least_s
        ]
        return sorted(found, key=lambda one: one.num_bytes * (one.progress_s - now_s))
