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
from coordinator.routing.slots import Floats, Ints
from coordinator.routing.waiting import Newcomer
from pdserve._native import FleetView

NO_PLACE_S = 1e3  # added where the request has to wait for one: only if there is none anywhere


class Times(NamedTuple):
    """Of one request at nodes that have been chosen."""

    ttft_s: float
    tpot_s: float
    wait_s: float = 0.0  # for a place, when token 1 has been computed
    held_s: float = 0.0  # of it: in the TTFT, and not in the TPOT


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

    @cached_property
    def view(self) -> FleetView:
        """All nodes, as they are to this request."""
        return self.newcomer.view(self.fleet, self.decodes, self.now_s)

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
        hits = self.hits
        prompt_s = np.empty(self.fleet.capacity)
        self.view.prompts(self.num_tokens, hits.slots, *self.usable, prompt_s)
        return prompt_s

    # ---- the tokens behind it ------------------------------------------------------------------

    @cached_property
    def pace_now_s(self) -> Floats:
        """Of a token, with the request in the batches of now."""
        return self.paces_s(0.0)

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

    def paces_s(self, in_s: float, full_s: float = 0.0) -> Floats:
        """Of a token, with the request in the batches of then; `full_s` more without a place."""
        paces_s = np.empty(self.fleet.capacity)
        self.view.paces(in_s, full_s, paces_s)
        return paces_s

    def handovers_s(self, prefill: int, ttft_s: float) -> Floats:
        """What of the KV's way is left when the prompt has been computed at `prefill`."""
        handovers_s, prompt_s = np.empty(self.fleet.capacity), float(self.prompt_s[prefill])
        self.view.handovers(
            self.num_tokens, self.hits.slots, *self.usable, prompt_s, ttft_s, handovers_s
        )
        return handovers_s
