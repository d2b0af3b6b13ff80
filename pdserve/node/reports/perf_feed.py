"""Tells coordinators what a node's steps and pulls cost: once measured, and after large changes.

Every load report has the current ratio of actual to reported step costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.node.prefixes.cost import PullCosts
from pdserve.protocol import PerfReport, TransferCosts
from pdserve.settings.config import EngineConfig
from pdserve.wire.outbox import Sender

MUCH = 1.25  # factor from which on a cost counts as changed
TYPICAL_BYTES = (1 << 16, 1 << 20, 1 << 26)  # a block, a short prompt, a long one


class PerfFeed:
    """Sends a node's costs to its coordinators. Belongs to the event loop."""

    def __init__(self, links: Sequence[Sender], costs: PullCosts, engine: EngineConfig) -> None:
        self._links = links
        self._costs = costs
        self._engine = engine
        self._told: PerfReport | None = None  # None: step costs are not known yet
        costs.on_pull(self._pull_learned)

    def attached(self, link: Sender) -> None:
        """Send the costs, if known, to a coordinator that has just attached."""
        if self._told is not None:
            link.send(self._told)

    def tell(self) -> None:
        """Send the current costs to all coordinators; step costs are known from now on."""
        self._told = PerfReport(
            step=self._costs.perf.costs,
            token_budget=self._engine.token_budget,
            max_batch_size=self._engine.max_batch_size,
            transfers=self._costs.transfers(),
        )
        for link in self._links:
            link.send(self._told)

    def _pull_learned(self, *_: object) -> None:
        told = self._told
        if told is not None and _differ_much(told.transfers, self._costs.transfers()):
            self.tell()


def _differ_much(told: Sequence[TransferCosts], known: Sequence[TransferCosts]) -> bool:
    before = {costs.transport: costs for costs in told}
    return any(
        costs.transport not in before
        or any(
            not 1 / MUCH <= _pull_s(costs, size) / _pull_s(before[costs.transport], size) <= MUCH
            for size in TYPICAL_BYTES
        )
        for costs in known
    )


def _pull_s(costs: TransferCosts, num_bytes: int) -> float:
    return costs.fixed_s + num_bytes / costs.bytes_per_s
