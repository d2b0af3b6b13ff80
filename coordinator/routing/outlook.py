"""What one request is, to every node: what of its prompt is there, and what goes before it.

Token 1 comes after what goes before the prompt in the node's queue, what bringing over a cached
prefix takes, and the rest of the prompt (Mooncake, algorithm 1). What comes behind it depends on
whether the request is handed over (`handed_over.py`) or stays where it is (`one_node.py`).
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from coordinator.generation import GenerationRequest
from coordinator.prefix_index import Hits
from coordinator.routing.books import Books
from coordinator.routing.decode_load import DecodeLoad
from coordinator.routing.fleet import Fleet
from coordinator.routing.prefill_queues import PrefillQueues, ServiceClass
from coordinator.routing.sides import USUAL_TPOT_S, USUAL_TTFT_S
from coordinator.routing.slots import ALL, Floats, Ints
from coordinator.routing.waiting import Newcomer, Place, pace_s, place_at

NO_PLACE_S = 1e3  # added where the request has to wait for one: only if there is none anywhere


class Times(NamedTuple):
    """Of one request at nodes that have been chosen."""

    ttft_s: float
    tpot_s: float


class Outlook:
    """Of one request, at one moment. Arrays are by slot."""

    def __init__(
        self, fleet: Fleet, books: Books, request: GenerationRequest, hits: Hits, now_s: float
    ) -> None:
        self.request = request
        self.hits = hits
        self.now_s = now_s
        self.num_tokens = len(request.token_ids)
        self.output_tokens = books.lengths.expected(request.sampling)
        self.num_gaps = max(self.output_tokens - 1, 1)
        self.newcomer = Newcomer(
            context=self.num_tokens + self.output_tokens // 2,
            num_tokens=self.num_tokens + self.output_tokens,
            tpot_s=request.slo.tpot_s,
        )
        self.fleet = fleet
        self.decodes: DecodeLoad = books.decodes
        self.queues: PrefillQueues = books.queues

    # ---- the prompt ----------------------------------------------------------------------------

    @cached_property
    def queue_s(self) -> Floats:
        """What goes before it; on nodes that have streams, so much of prefill."""
        newcomer = ServiceClass.of(self.request.slo)
        return self.queues.before_s(newcomer, self.prompt_s, self.now_s)

    @cached_property
    def ttft_s(self) -> Floats:
        """On nodes that have no streams."""
        return self.queue_s + self.prompt_s

    @cached_property
    def usable(self) -> tuple[Ints, Ints]:
        """Of the hits, what can be reused: (in any tier, in the pool), tokens.

        The last token is always computed, and with it the whole of its block.
        """
        size = self.fleet.block_size[self.hits.slots]
        most = (self.num_tokens - 1) // size * size
        return np.minimum(self.hits.held, most), np.minimum(self.hits.in_pool, most)

    @cached_property
    def held(self) -> Ints:
        """Reusable tokens by slot, in any tier."""
        held = np.zeros(self.fleet.capacity, np.int64)
        held[self.hits.slots] = self.usable[0]
        return held

    @cached_property
    def prompt_s(self) -> Floats:
        """The prompt alone: computed, or brought over as far as somebody holds it."""
        fleet, hits, n = self.fleet, self.hits, self.num_tokens
        prompt_s = fleet.prompt_s(n, 0)
        if len(hits.slots) == 0:
            return prompt_s
        at, (held, in_pool) = hits.slots, self.usable
        computed_s = fleet.prefill_s(at, n - in_pool, in_pool)
        if (held > in_pool).any():
            load_s = fleet.tier_fixed_s[at] + fleet.tier_token_s[at] * (held - in_pool)
            computed_s = np.minimum(computed_s, load_s + fleet.prefill_s(at, n - held, held))
        prompt_s[at] = computed_s
        best = int(held.max())
        if best > 0:
            pull_s = fleet.pull_fixed_s + fleet.pull_token_s * (best - self.held)
            prompt_s = np.minimum(prompt_s, pull_s + fleet.prompt_s(n - best, best))
        return prompt_s

    # ---- the tokens behind it ------------------------------------------------------------------

    @cached_property
    def pace_now_s(self) -> Floats:
        """Of a token, with the request in the batches of now."""
        batch = self.decodes.at(self.now_s, self.now_s)
        return pace_s(self.fleet, ALL, batch, self.newcomer)

    @cached_property
    def rough_cost(self) -> Floats:
        """Of doing all of it on one node, by the batches of now."""
        slo = self.request.slo
        cost: Floats = self.ttft_s / (slo.ttft_s or USUAL_TTFT_S)
        cost += self.pace_now_s / (slo.tpot_s or USUAL_TPOT_S)
        return cost

    def alone_s(self, slot: int) -> float:
        """Of a token, in a batch of its own."""
        return self.fleet.decode_one_s(slot, 1, self.newcomer.context)

    def place(self, slot: int, ready_s: float) -> Place:
        """In a node's batch, from so many seconds on."""
        ready_s += self.now_s
        return place_at(self.fleet, self.decodes, slot, self.newcomer, self.now_s, ready_s)
