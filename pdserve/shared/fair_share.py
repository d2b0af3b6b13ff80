"""Weighted fair queueing among payers of equal priority: who asks for least per weight goes next.

Each payer has a *tag*: the service it has received, divided by its weight. The payers of one
priority share a virtual time, *now*, which follows the lowest tag of the active payers and never
goes back (start-time fair queueing; VTC, OSDI'24, does the same for LLMs). A payer that becomes
active again starts at now, or at most one burst before it. So using an idle machine costs nothing
later, and an absence earns no more than the burst. The common alternative, a decaying sum of past
service, has no such bound: a payer that was away for a half-life can keep others out as long.

The burst protects light users from a flood: with strict shares they would get just their share of
the machine, whereas without the flood they had nearly all of it.

What a payer asks for counts like what it received, up to a burst of the heaviest active payer: its
rank is its tag plus what waits for it now. So a payer that asks for more than others is behind them
before anybody has received much.

The service of two payers that are active all the time, divided by their weights, differs by at most
two bursts of the heaviest one, and their own bursts and largest charges divided by their weights,
however long they run.

`Turns` are for what serves few callers at a time: each tenant gets its own, however many it asks
for.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Container, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

BURST_S: Final = 2.0  # seconds of service
FEW: Final = 64  # number of tags below which none is dropped
MOST_SCALES: Final = 256  # priorities; those of active payers are kept, however many they are


class Payer(Protocol):
    """The entity that a request's service is charged to: `Slo` and `Targets` are payers."""

    @property
    def payer(self) -> str:
        """Name of the payer: a service class, or a tenant within a class."""
        ...

    @property
    def priority(self) -> int:
        """Priority; fair sharing applies within one priority. A name may occur in several."""
        ...

    @property
    def weight(self) -> float:
        """Share relative to other payers; above 0."""
        ...


class _Tag(NamedTuple):
    """The tag of one payer."""

    at: float
    ahead: float  # the payer's burst; a tag this far behind now has no effect any more


@dataclass(slots=True)
class _Scale:
    """The virtual time and the tags of one priority."""

    now: float = 0.0
    heaviest: float = 1.0  # weight of an active payer
    tags: dict[str, _Tag] = field(default_factory=dict)
    most_tags: int = FEW  # old tags are dropped when there are more


class FairShare:
    """The tags of all payers. Amounts can be in any unit; predicted seconds work best."""

    def __init__(self, burst: float = BURST_S) -> None:
        self._burst = burst
        self._scales: dict[int, _Scale] = {}  # by priority, least recently used first
        self._active: Container[int] = ()  # the priorities of active payers

    def present(self, payers: Iterable[Payer]) -> None:
        """Name all payers that are active now, that is waiting or being served.

        Call this before asking for ranks. A payer that is named every time loses nothing by
        waiting.
        """
        lowest: dict[int, float] = {}
        heaviest: dict[int, float] = {}
        for payer in payers:
            priority, at = payer.priority, self._at(self._scale(payer.priority), payer)
            lowest[priority] = min(at, lowest.get(priority, at))
            heaviest[priority] = max(payer.weight, heaviest.get(priority, 0.0))
        for priority, at in lowest.items():
            scale = self._use(priority)
            scale.now = max(scale.now, at)
            scale.heaviest = heaviest[priority]
        self._active = lowest

    def charge(self, payer: Payer, amount: float) -> None:
        """Record service given to a payer; a negative amount corrects an earlier charge."""
        scale = self._use(payer.priority)
        while len(self._scales) > MOST_SCALES:  # clients choose priorities
            oldest = next(iter(self._scales))
            if oldest in self._active:
                break
            del self._scales[oldest]
        at = self._at(scale, payer) + amount / payer.weight
        scale.tags[payer.payer] = _Tag(at, self._burst / payer.weight)
        if len(scale.tags) > scale.most_tags:
            _forget(scale)

    def serve(
        self,
        payers: Sequence[Payer],
        parts: Sequence[tuple[Payer, float]],
        amounts: Sequence[float],
    ) -> None:
        """For each amount in turn, name these payers and charge some of them their parts of it.

        No amount is negative.
        """
        for number, amount in enumerate(amounts, 1):
            self.present(payers)
            for payer, part in parts:
                self.charge(payer, amount * part)
            if len(payers) == len(parts) == 1:
                self._serve_alone(*parts[0], amounts[number:])
                return

    def rank(self, payer: Payer, waiting: float = 0.0) -> float:
        """Return the payer's rank among payers of equal priority: the smallest goes first.

        `waiting` is the service that the payer asks for now. It counts up to what no active payer
        needs more than a burst of service to make up for.
        """
        scale = self._scale(payer.priority)
        most = self._burst / scale.heaviest
        return self._at(scale, payer) + min(waiting / payer.weight, most)

    def is_owed(self, payer: Payer) -> bool:
        """Whether the payer's tag is behind `now`: others were served in its absence."""
        scale = self._scale(payer.priority)
        return self._at(scale, payer) < scale.now

    def yields_to(self, payer: Payer, other: Payer) -> bool:
        """Whether `payer` has to make up for a delay of both payers.

        It has to if it has lower priority, or if it received more service than `other`, by more
        than a burst. Two payers with equal demand are never that far apart for long.
        """
        if payer.priority != other.priority:
            return payer.priority < other.priority
        scale = self._scale(payer.priority)
        return self._at(scale, payer) - self._at(scale, other) > self._burst / other.weight

    def _serve_alone(self, payer: Payer, part: float, amounts: Sequence[float]) -> None:
        """Continue `serve` where the only payer has just been charged: its tag only rises."""
        scale, weight = self._scale(payer.priority), payer.weight
        at, now = scale.tags[payer.payer].at, scale.now
        for amount in amounts:
            if at > now:
                now = at
            at += amount * part / weight
        scale.now, scale.tags[payer.payer] = now, _Tag(at, self._burst / weight)

    def _use(self, priority: int) -> _Scale:
        """Return the scale of a priority, which is now the most recently used one."""
        scale = self._scales.pop(priority, None) or _Scale()
        self._scales[priority] = scale
        return scale

    def _scale(self, priority: int) -> _Scale:
        return self._scales.setdefault(priority, _Scale())

    def _at(self, scale: _Scale, payer: Payer) -> float:
        earliest = max(0.0, scale.now - self._burst / payer.weight)  # time begins at 0
        tag = scale.tags.get(payer.payer)
        return earliest if tag is None else max(tag.at, earliest)


def _forget(scale: _Scale) -> None:
    """Drop tags that no longer have an effect; the tags of active payers always have one."""
    scale.tags = {name: tag for name, tag in scale.tags.items() if tag.at > scale.now - tag.ahead}
    scale.most_tags = 2 * len(scale.tags) + FEW


class Turns:
    """A semaphore with a queue for each tenant; the queues are served round robin."""

    def __init__(self, num_places: int = 1) -> None:
        self._num_free = num_places
        # Tenant |-> its waiting callers; the tenant whose turn is next comes first.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn of this tenant's, and have it while in the context."""
        await self.take(tenant)
        try:
            yield
        finally:
            self.pass_on()

    async def take(self, tenant: str) -> None:
        """Wait for a turn of this tenant's. It ends with `pass_on`."""
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn had just come
                self.pass_on()
            raise

    def try_take(self) -> bool:
        """Take a turn if one is free."""
        is_free = self._num_free > 0
        self._num_free -= is_free
        return is_free

    def pass_on(self) -> None:
        """End a turn: it goes to the next caller who still waits."""
        while self._waiting:
            tenant, queue = self._waiting.popitem(last=False)
            while queue:
                turn = queue.popleft()
                if turn.cancelled():
                    continue
                turn.set_result(None)
                if queue:
                    self._waiting[tenant] = queue  # at the end
                return
        self._num_free += 1
