"""A prefill engine without a model: steps take what they are predicted to take."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import inf

from pdserve.engine.core import EngineCore
from pdserve.engine.interface import shape_of
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request, SampledToken
from pdserve.engine.scheduler import Queues
from pdserve.lifecycle import Lifecycle, Targets
from pdserve.measured.perf_model import PerfModel
from pdserve.protocol import StepCosts
from pdserve.settings.config import PrefillPolicyName
from pdserve.shared.clock import ManualClock
from tests.fakes.runner import (
    prefill_policy,
)
from tests.requests import make_request

BLOCK = 4
TOKEN_S = 0.001
_numbers = itertools.count(1000)
KNOT = 64  # tokens


def make_perf() -> PerfModel:
    """1 ms a token from 64 tokens on; fewer take as long."""
    knots = [KNOT, 10 * KNOT]
    return PerfModel(StepCosts(knot_tokens=knots, knot_s=[n * TOKEN_S for n in knots]))


BUDGET = 256
SATURATING = make_perf().saturating_tokens(BUDGET)  # a few less than 64


class Prefills:
    """One node's prompts, by one policy, step by step on a manual clock."""

    def __init__(
        self,
        name: PrefillPolicyName,
        *,
        num_blocks: int = 2000,
        token_budget: int = BUDGET,
        max_batch_size: int = 64,
        prefill_chunk: int = 0,
        num_kept_free: int = 0,
        num_pinned: Callable[[], int] = lambda: 0,
    ) -> None:
        self.clock = ManualClock()
        self.perf = make_perf()
        self.pool = BlockPool(num_blocks, BLOCK)
        policy = prefill_policy(
            token_budget,
            max_batch_size,
            name,
            self.perf,
            self.clock,
            prefill_chunk,
            num_kept_free=num_kept_free,
            num_pinned=num_pinned,
        )
        self.core = EngineCore(Queues(self.pool, self.clock), policy, frozenset())
        self.finished: list[Request] = []
        self.steps: list[list[tuple[Request, int]]] = []

    def submit(
        self,
        num_tokens: int,
        *,
        ttft_s: float = inf,
        priority: int = 0,
        payer: str = "",
        weight: float = 1.0,
        prefix: int = 0,
    ) -> Request:
        """A prompt that may share its first `prefix` tokens with others, and shares no others."""
        now_s = self.clock.now()
        request = make_request(
            [7] * prefix + [next(_numbers) for _ in range(num_tokens - prefix)],
            leg_token_limit=1,
            targets=Targets(
                payer=payer,
                priority=priority,
                weight=weight,
                first_token_s=now_s + ttft_s,
            ),
        )
        request.lifecycle = Lifecycle(received_s=now_s)
        self.core.submit(request)
        return request

    def step(self) -> list[tuple[Request, int]]:
        """Plan and end a step; time passes. What was planned, as (request, tokens)."""
        rows = self.core.begin_step()
        planned = [(row.request, row.num_tokens) for row in rows]
        if rows:
            self.steps.append(planned)
            self.clock.advance(self.perf.step_s(shape_of(rows)))
            sampled = [SampledToken(1) if row.samples else None for row in rows]
            for request in self.core.end_step(rows, sampled, self.clock.now()):
                self.core.forget(request)
                self.finished.append(request)
        return planned

    def run(self) -> list[Request]:
        """Until there is nothing left to do; returns who ended, in that order."""
        while self.step():
            pass
        assert not self.core.num_requests
        assert self.pool.num_free == self.pool.num_blocks
        self.pool.check_integrity()
        return self.finished

    def was_in_time(self, request: Request) -> bool:
        """Whether token 1 came when it was due."""
        first_token_s = request.lifecycle.first_token_s
        return first_token_s is not None and first_token_s <= request.targets.first_token_s
