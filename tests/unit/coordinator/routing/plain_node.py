"""What csrc/routing computes, said again for one node, in the plainest way: a reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import inf

from coordinator.routing.loads.decode import BUCKET_S, NUM_BUCKETS, Plan
from pdserve.kv import KvLayout
from pdserve.measured.perf_model import PerfModel, StepShape
from pdserve.protocol import PerfReport
from pdserve.rules.batch import has_place

MOMENT_S = 8 * BUCKET_S
NUM_MOMENTS = NUM_BUCKETS // 8
LEAST_CHUNK = 16


@dataclass
class PlainNode:
    """One node, and who decodes there when."""

    perf: PerfReport
    prefill_ratio: float
    decode_ratio: float
    kv_tokens: int
    layout: KvLayout
    plans: list[Plan]
    present: int  # bucket
    context: int  # of the newcomer, on average
    num_tokens: int  # of its KV at its end
    limit_s: float
    num_yielding: int = 0  # requests of a batch that would give their places to the newcomer

    @cached_property
    def model(self) -> PerfModel:
        return PerfModel(self.perf.step, self.prefill_ratio, self.decode_ratio)

    @cached_property
    def raw(self) -> PerfModel:
        return PerfModel(self.perf.step)

    def batch(self, ahead: int) -> tuple[int, int]:
        """(requests, context) so many buckets from now."""
        return self._batches[ahead]

    @cached_property
    def _batches(self) -> list[tuple[int, int]]:
        batches = []
        for bucket in range(self.present, self.present + NUM_BUCKETS):
            here = [p for p in self.plans if p.first <= bucket < (p.end or inf)]
            batches.append((len(here), sum(plan.num_tokens for plan in here)))
        return batches

    def with_s(self, ahead: int) -> float:
        """A step with the newcomer; who is too many takes turns."""
        requests, context = self.batch(ahead)
        requests, context = requests + 1, context + self.context
        rows = min(requests, self.perf.max_batch_size)
        reading_s = self.perf.step.context_s * context * self.decode_ratio
        return self.model.decode_s(rows, 0) * requests / rows + reading_s

    def has_place(self, ahead: int) -> bool:
        requests, context = self.batch(ahead)
        return has_place(
            requests + 1,
            self.perf.max_batch_size,
            self.with_s(ahead),
            self.limit_s,
            has_kv=self.layout.held_tokens(context + self.num_tokens, requests + 1)
            <= self.kv_tokens,
        )

    def joining(self, ahead: int) -> tuple[float, bool]:
        """(step, has a place) if as few requests as possible give theirs."""
        if self.has_place(ahead):
            return self.with_s(ahead), True
        for num_given in range(1, min(self.num_yielding, self.batch(ahead)[0]) + 1):
            fewer = self._without(ahead, num_given)
            if fewer.has_place(0):
                return fewer.with_s(0), True
        return self.with_s(ahead), False

    def _without(self, ahead: int, num_given: int) -> PlainNode:
        """Some requests less, each with the same part of the context."""
        requests, context = self.batch(ahead)
        left = requests - num_given
        plans = [Plan(0, self.present, None, 0)] * left
        if left:
            plans[0] = Plan(0, self.present, None, context * left // requests)
        return replace(self, plans=plans)

    def place(self, ready_s: float) -> tuple[float, float]:
        """(wait, pace) at the first place that nobody who is to come needs."""
        ready = min(int(ready_s / BUCKET_S), NUM_BUCKETS - 1)
        full = [ahead for ahead in range(NUM_BUCKETS) if not self.has_place(ahead)]
        first = min(max(ready, full[-1] + 1 if full else 0), NUM_BUCKETS - 1)
        return (first - ready) * BUCKET_S, self.with_s(first)

    # ---- a prompt beside streams ---------------------------------------------------------------

    def mixed_s(self, rows: int, context: int, chunk: int) -> float:
        """A step of a chunk beside so many streams."""
        costs = self.perf.step
        beside_s = costs.sampled_s * rows + costs.context_s * context
        tokens_s = self.raw.step_s(StepShape(rows + chunk)) if rows + chunk else 0.0
        return (tokens_s + beside_s) * self.prefill_ratio

    def chunk(self, rows: int, context: int) -> int:
        """Tokens of a prompt in a step beside these."""
        most = max(self.perf.token_budget - rows, 1)
        if rows == 0 or self.limit_s == inf:
            return most
        costs = self.perf.step
        beside_s = costs.sampled_s * rows + costs.context_s * context
        left_s = self.limit_s - beside_s * self.prefill_ratio
        fits = sum(step_s <= left_s for step_s in self._longest_s) - rows
        return min(max(fits, min(most, LEAST_CHUNK)), most)

    @cached_property
    def _longest_s(self) -> list[float]:
        """Of steps of up to 1, 2, ... tokens."""
        widest = max(self.perf.token_budget, self.perf.max_batch_size)
        return list(accumulate((self.mixed_s(0, 0, n) for n in range(1, widest + 1)), max))

    def streams(self, moment: int) -> tuple[int, int]:
        requests, context = self.batch(moment * 8)
        return min(requests, self.perf.max_batch_size - 1), context

    def alone_s(self, chunk: int) -> float:
        """A chunk's part of a step of prompts only."""
        budget = self.perf.token_budget
        return chunk * self.mixed_s(0, 0, budget) / budget

    def speed(self, rows: int, context: int) -> float:
        chunk = self.chunk(rows, context)
        return self.alone_s(chunk) / self.mixed_s(rows, context, chunk)

    def takes_s(self, alone_s: float) -> float:
        """Until what would take so long alone is done."""
        done_s = 0.0
        for moment in range(NUM_MOMENTS):
            speed = self.speed(*self.streams(moment))
            is_last = moment == NUM_MOMENTS - 1
            if is_last or done_s + speed * MOMENT_S > alone_s:
                return moment * MOMENT_S + (alone_s - done_s) / speed
            done_s += speed * MOMENT_S
        raise AssertionError("the last moment has no end")
