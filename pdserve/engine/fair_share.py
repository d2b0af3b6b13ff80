"""How payers of equal priority share an engine: whoever got least of late goes first.

Attained service fades, so that nobody pays for long for an hour in which nobody else was there,
and nobody saves up for a flood. (VTC, OSDI'24, has counters that are lifted instead.)
"""

from __future__ import annotations

from pdserve.clock import Clock

HALF_LIFE_S = 10.0
LEAD = 0.05  # of all recent service: so far ahead gets the class that is being served


class FairShare:
    """Recent service of each payer: a class, or a tenant within one.

    Amounts are in any one unit, best in predicted seconds. Fading is the same for all, so
    only service changes their order.
    """

    def __init__(self, clock: Clock, half_life_s: float = HALF_LIFE_S) -> None:
        self._clock = clock
        self._half_life_s = half_life_s
        self._attained: dict[str, float] = {}  # by payer, divided by its weight
        self._served = ""  # the payer charged last
        self._faded_s = clock.now()  # until when the amounts have faded

    def charge(self, payer: str, weight: float, amount: float) -> None:
        """The payer has been given so much."""
        self._fade()
        self._attained[payer] = self._attained.get(payer, 0.0) + amount / weight
        self._served = payer

    def rank(self, payer: str) -> float:
        """Smaller goes first: recent service over weight.

        The payer that is being served has a small lead, so that two of them do not take turns with
        every chunk and both end late.
        """
        attained = self._attained.get(payer, 0.0)
        if payer == self._served:
            attained -= LEAD * sum(self._attained.values())
        return attained

    def _fade(self) -> None:
        now_s = self._clock.now()
        left = 0.5 ** ((now_s - self._faded_s) / self._half_life_s)
        self._faded_s = now_s
        for payer in self._attained:
            self._attained[payer] *= left
