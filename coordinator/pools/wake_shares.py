"""Each tenant's share of the time that goes into wakes: who asks for all in turn cannot thrash.

A node stays awake for as long as its wake took, so at most half of the nodes' time goes into wakes.
Of this half, the tenants that wait, or had wakes lately, have equal shares; who is alone has all. A
tenant is charged for a wake as another model than its last one. With its share spent, it goes on
with that one, however often others have its node taken away, and wakes no other until some of what
it spent is LATELY_S ago. Before that, its requests count for less the more models it woke.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple

LATELY_S: Final = 60.0


class _Wake(NamedTuple):
    at_s: float
    model: str
    charged_s: float


@dataclass(slots=True)
class WakeShares:
    """The wakes of the last LATELY_S."""

    _of: dict[str, deque[_Wake]] = field(default_factory=dict)  # by tenant
    _share_s: float = inf

    def look(self, waiting: Collection[str], num_nodes: int, now_s: float) -> None:
        """Share the time of so many nodes between the tenants that wait and those of `made_for`."""
        for tenant, wakes in list(self._of.items()):
            while wakes and now_s - wakes[0].at_s >= LATELY_S:
                wakes.popleft()
            if not wakes:
                del self._of[tenant]
        num_tenants = len(self._of.keys() | set(waiting))
        self._share_s = LATELY_S / 2 * num_nodes / num_tenants if num_tenants > 1 else inf

    def made_for(self, tenants: Collection[str], model: str, takes_s: float, now_s: float) -> None:
        """Charge those who waited for a wake that takes so long."""
        for tenant in tenants:
            wakes = self._of.setdefault(tenant, deque())
            is_same = bool(wakes) and wakes[-1].model == model
            wakes.append(_Wake(now_s, model, 0.0 if is_same else takes_s))

    def weight(self, tenant: str, model: str) -> float:
        """Return how much a request counts in what a wake is worth, 0 to 1."""
        wakes = self._of.get(tenant)
        if not wakes:
            return 1.0
        is_spent = sum(wake.charged_s for wake in wakes) >= self._share_s
        if is_spent and wakes[-1].model != model:
            return 0.0
        return 1.0 / (1 + len({wake.model for wake in wakes} - {model}))
