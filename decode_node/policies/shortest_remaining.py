"""`shortest-remaining`: of those that wait for a place, the shortest answer joins first."""

from __future__ import annotations

from decode_node.policies.decodes_first import TpotCap
from decode_node.policies.line import DecodeLine
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Queues
from pdserve.measured.perf_model import PerfModel
from pdserve.settings.config import EngineConfig, PolicyConfig
from pdserve.shared.clock import Clock


class ShortestFirstLine(DecodeLine):
    """Between equals, by the tokens that are expected to come."""

    def after(self, request: Request, queues: Queues) -> float:
        """As DecodeLine.after."""
        return queues.headroom.remaining(request)


class ShortestRemaining(TpotCap):
    """Joins by the expected length of answers; batches are those of `tpot-cap`.

    A wait for a place is spread over an answer's tokens, so a short one bears less of it. Those
    that are late because of others keep the share of places that late ones have.
    """

    def __init__(
        self, policy: PolicyConfig, engine: EngineConfig, perf: PerfModel, clock: Clock
    ) -> None:
        super().__init__(policy, engine, perf, clock, ShortestFirstLine)
