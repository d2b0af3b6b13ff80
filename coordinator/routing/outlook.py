"""Predictions for one request at every node: its cached prefix, the queue before it, its prefill.

TTFT is the sum of the work before the prompt in the node's queue, the transfer of a cached prefix,
and the computation of the rest of the prompt (Mooncake, algorithm 1). The times after token 1
depend on whether the request is handed off (`handed_off.py`) or stays on its node (`one_node.py`).
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from coordinator.generation import GenerationRequest
from coordinator.prefixes.index import Hits
from coordinator.routing.fleet import Fleet
from coordinator.routing.loads.books import Books
from coordinator.routing.loads.decode import DecodeLoad
from coordinator.routing.loads.prefill import PrefillQueues, ServiceClass
from coordinator.routing.loads.slots import Floats, Ints
from coordinator.routing.sides import USUAL_TPOT_S, USUAL_TTFT_S
from coordinator.routing.waiting import Newcomer
from pdserve._native import FleetView

NO_PLACE_S = 1e3  # penalty where it would have to wait: such a node is the last choice


class Times(NamedTuple):
    """Predicted times of one request at the chosen nodes."""

    ttft_s: float
    tpot_s: float
    wait_s: float = 0.0  # for a place, after token 1 has been computed
    held_s: float = 0.0  # part of wait_s that is in the TTFT, not in the TPOT


class Outlook:
    """Predictions for one request at one time. Arrays are by slot."""

    def __init__(
        self, fleet: Fleet, books: Books, request: GenerationRequest, hits: Hits, now_s: float
    ) -> None:
        self.request = request
        self.hits = hits
        self.now_s = now_s
        self.num_tokens = request.prompt.num_tokens + len(request.output_token_ids)
        left = books.lengths.remaining(request.sampling, len(request.output_token_ids))
        self.output_tokens = max(round(left), 1)
        self.num_gaps = max(self.output_tokens - 1, 1)
        self.newcomer = Newcomer(
            context=self.num_tokens + self.output_tokens // 2,
            num_tokens=self.num_tokens + self.output_tokens,
            tpot_s=request.slo.tpot_s,
        )
        self.fleet = fleet
        self.decodes: DecodeLoad = books.decodes
        self.queues: PrefillQueues = books.queues
        newcomer = ServiceClass.of(request.slo)
        yielding = self.decodes.yielding(newcomer, now_s)
        # The native view of all nodes for this request.
        self.view: FleetView = self.newcomer.view(fleet, self.decodes, now_s, yielding)

        # Reusable tokens by hit: in any tier, and in the pool. The last token is always computed,
        # and with it the whole of its block.
        self._usable: tuple[Ints, Ints] = hits.held, hits.in_pool
        if len(hits.slots):
            size = fleet.block_size[hits.slots]
            most = (self.num_tokens - 1) // size * size
            self._usable = np.minimum(hits.held, most), np.minimum(hits.in_pool, most)
        # The prompt alone: the cached prefix is transferred, the rest computed.
        self.prompt_s: Floats = np.empty(fleet.capacity)
        self.view.prompts(self.num_tokens, hits.slots, *self._usable, self.prompt_s)
        # Queue time before it; on nodes with decode streams, its prefill work only.
        self.queue_s: Floats = self.queues.before_s(
            newcomer, self.prompt_s, now_s, request.slo.ttft_s
        )
        self.ttft_s: Floats = self.queue_s + self.prompt_s  # on nodes without decode streams

    @property
    def ends_with_token_1(self) -> bool:
        """Whether the request wants no more than a single token, so no decode node."""
        return self.request.sampling.max_tokens <= 1

    def held(self, slot: int) -> int:
        """Return the reusable tokens at a node, in any tier."""
        return int(self._usable[0][self.hits.slots == slot].sum())

    # ---- the tokens after it -------------------------------------------------------------------

    @cached_property
    def pace_now_s(self) -> Floats:
        """Time per token with the request in the current batches."""
        return self.paces_s(0.0)

    @cached_property
    def rough_cost(self) -> Floats:
        """Rough cost of serving all of the request on one node, by the current batches."""
        slo = self.request.slo
        cost: Floats = self.ttft_s / (slo.ttft_s or USUAL_TTFT_S)
        cost += self.pace_now_s / (slo.tpot_s or USUAL_TPOT_S)
        return cost

    def alone_s(self, slot: int) -> float:
        """Return the time per token in a batch of its own."""
        return self.fleet.decode_one_s(slot, 1, self.newcomer.context)

    def paces_s(self, in_s: float, full_s: float = 0.0) -> Floats:
        """Return the time per token with the request in the batches predicted `in_s` from now.

        `full_s` is added on nodes without a place.
        """
        paces_s = np.empty(self.fleet.capacity)
        self.view.paces(in_s, full_s, paces_s)
        return paces_s

    def handoffs_s(self, prefill: int, ttft_s: float) -> Floats:
        """Return the KV transfer time left when the prompt has been computed at `prefill`."""
        handoffs_s, prompt_s = np.empty(self.fleet.capacity), float(self.prompt_s[prefill])
        self.view.handoffs(
            self.num_tokens, self.hits.slots, *self._usable, prompt_s, ttft_s, handoffs_s
        )
        return handoffs_s
