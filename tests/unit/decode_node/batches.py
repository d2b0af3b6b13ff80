"""Batches in all states, without a model: a step of n tokens takes 9 + n milliseconds."""

from __future__ import annotations

from math import inf
from typing import Any

from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.lifecycle import Targets
from pdserve.measured.perf_model import PerfModel
from pdserve.protocol import StepCosts
from pdserve.shared.clock import ManualClock
from tests.requests import make_request

BLOCK = 4


def linear_perf() -> PerfModel:
    return PerfModel(StepCosts(knot_tokens=[1, 1001], knot_s=[0.010, 1.010]))


class Batch:
    """Queues over a pool, and short ways to fill them."""

    def __init__(self, num_blocks: int = 1000) -> None:
        self.clock = ManualClock(100.0)
        self.perf = linear_perf()
        self.pool = BlockPool(num_blocks, BLOCK, prefix_cache=False)
        self.queues = Queues(self.pool, self.clock)

    def decoding(
        self,
        num_tokens: int = 3,
        *,
        tpot_s: float = inf,
        priority: int = 0,
        num_outputs: int = 1,
        first_token_s: float = 100.0,
        max_tokens: int = 100,
        payer: str = "",
    ) -> Request:
        """A request that has `num_outputs` of its tokens, the first at `first_token_s`."""
        request = make_request(
            num_tokens - num_outputs,
            max_tokens=max_tokens,
            output_token_ids=[1] * num_outputs,
            num_computed_tokens=num_tokens - 1,
            targets=Targets(tpot_s=tpot_s, priority=priority, payer=payer or f"p{priority}"),
        )
        request.lifecycle.received_s = self.clock.now()
        request.lifecycle.first_token_s = first_token_s
        request.block_table = self.pool.allocate(-(-num_tokens // BLOCK))
        self.queues.running.append(request)
        return request

    def waiting(
        self,
        num_tokens: int,
        *,
        tpot_s: float = inf,
        priority: int = 0,
        ttft_s: float = inf,
        leg_token_limit: int | None = None,
        payer: str = "",
    ) -> Request:
        """A prompt that has just been submitted."""
        now_s = self.clock.now()
        request = make_request(
            num_tokens,
            leg_token_limit=leg_token_limit,
            targets=Targets(
                tpot_s=tpot_s,
                priority=priority,
                first_token_s=now_s + ttft_s,
                payer=payer or f"p{priority}",
            ),
        )
        request.lifecycle.received_s = now_s
        self.queues.submit(request)
        return request

    def begun(self, num_tokens: int, **targets: Any) -> Request:
        """A prompt that has its blocks."""
        request = self.waiting(num_tokens, **targets)
        assert self.queues.admit(request)
        return request


def tokens_of(request: Request, rows: list[Scheduled]) -> int:
    """Computed of one request in a step."""
    return sum(row.num_tokens for row in rows if row.request is request)
