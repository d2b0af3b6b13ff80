"""How payers of equal priority share what serves them: whoever got least for its weight goes first.

Each payer has a *tag*: what it was given, over its weight, on a scale that all of its priority
share. The scale's *now* follows the lowest tag of those who want something, and never goes back
(start-time fair queueing; VTC, OSDI'24, for LLMs). Whoever comes back after an absence begins at
now, at most a burst before it: an hour in which nobody else was there costs nobody anything later,
and an hour of absence earns no more than that burst. A decaying sum of what each was given, the
usual other way, has no such bound: whoever was away for its half-life keeps others out for as long.

The burst is what keeps a flood from delaying those who ask for little. With strict shares they
would get their part of the machine and no more, while without the flood they had nearly all of it.

Two payers who want something all the time are given amounts that differ, over their weights, by
no more than the two bursts, leads and largest charges over these weights, however long it takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

BURST_S: Final = 2.0  # of service
LEAD_S: Final = 0.25  # so far ahead gets who is being served
FEW: Final = 64  # payers that are not worth forgetting
MOST_SCALES: Final = 256  # priorities of which it is known who was given what


class Payer(Protocol):
    """Against whose share something counts: `Slo` and `Targets` say it of a request."""

    @property
    def payer(self) -> str:
        """Its name: a class, or a tenant's part of one."""
        ...

    @property
    def priority(self) -> int:
        """Only payers of the same one share; the same name may stand in several."""
        ...

    @property
    def weight(self) -> float:
        """Above 0."""
        ...


class _Tag(NamedTuple):
    """Of one payer."""

    at: float
    ahead: float  # its burst: from when it is that far behind now, it says nothing any more


@dataclass(slots=True)
class _Scale:
    """Of one priority."""

    now: float = 0.0
    tags: dict[str, _Tag] = field(default_factory=dict)
    most_tags: int = FEW  # forget old ones when there are more
    served: str = ""  # who was charged last


class FairShare:
    """Tags of payers. Amounts are in any one unit, best in predicted seconds.

    `burst` and `lead` are in that unit, too. Who is being served has the lead, so that two payers
    do not take turns with every chunk, and both end late.
    """

    def __init__(self, burst: float = BURST_S, lead: float = LEAD_S) -> None:
        self._burst = burst
        self._lead = lead
        self._scales: dict[int, _Scale] = {}  # by priority, the last one charged last

    def present(self, payers: Iterable[Payer]) -> None:
        """These want something, or are being served, at this moment: all of their priorities.

        Called before ranks are asked for. Who is named each time loses nothing by waiting.
        """
        lowest: dict[int, float] = {}
        for payer in payers:
            at = self._at(self._scale(payer.priority), payer)
            lowest[payer.priority] = min(at, lowest.get(payer.priority, at))
        for priority, at in lowest.items():
            scale = self._scale(priority)
            scale.now = max(scale.now, at)

    def charge(self, payer: Payer, amount: float) -> None:
        """It has been given so much; less than 0 corrects a former charge."""
        scale = self._scales.pop(payer.priority, None) or _Scale()
        self._scales[payer.priority] = scale
        while len(self._scales) > MOST_SCALES:  # clients choose priorities
            del self._scales[next(iter(self._scales))]
        at = self._at(scale, payer) + amount / payer.weight
        scale.tags[payer.payer] = _Tag(at, self._burst / payer.weight)
        scale.served = payer.payer
        if len(scale.tags) > scale.most_tags:
            _forget(scale)

    def rank(self, payer: Payer) -> float:
        """Smaller goes first, among payers of one priority."""
        scale = self._scale(payer.priority)
        lead = self._lead / payer.weight if payer.payer == scale.served else 0.0
        return self._at(scale, payer) - lead

    def is_owed(self, payer: Payer) -> bool:
        """Whether others were given more while it was away, and it has not caught up yet."""
        scale = self._scale(payer.priority)
        return self._at(scale, payer) < scale.now

    def yields_to(self, payer: Payer, other: Payer) -> bool:
        """Whether what delays both is for it to make up: it has less priority, or it was given more
        than the other one by over a burst. Two who ask alike are never that far apart for long."""
        if payer.priority != other.priority:
            return payer.priority < other.priority
        scale = self._scale(payer.priority)
        return self._at(scale, payer) - self._at(scale, other) > self._burst / other.weight

    def _scale(self, priority: int) -> _Scale:
        return self._scales.setdefault(priority, _Scale())

    def _at(self, scale: _Scale, payer: Payer) -> float:
        earliest = max(0.0, scale.now - self._burst / payer.weight)  # before 0 nobody was away
        tag = scale.tags.get(payer.payer)
        return earliest if tag is None else max(tag.at, earliest)


def _forget(scale: _Scale) -> None:
    """Tags that are as good as none. Those of payers who want something never are."""
    scale.tags = {name: tag for name, tag in scale.tags.items() if tag.at > scale.now - tag.ahead}
    scale.most_tags = 2 * len(scale.tags) + FEW
