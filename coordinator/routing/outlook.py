"""Predictions for one request at every node: its cached prefix, the queue before it, its prefill.

TTFT is the sum of the work before the prompt in the node's queue, the transfer of a cached prefix,
and the computation of the rest of the prompt (Mooncake, algorithm 1). The times after token 1
depend on whether the request is handed off (`HandedOff`) or stays on its node (`OneNode`).

`OneNode`: a request that one node serves alone, and its effect on the other requests there. The
arithmetic and its reasons are in csrc/routing/one_node.h.

`HandedOff`: the decode phase of a request that another node has prefilled. Its TPOT is set by the
batch that the decode node will have when token 1 is there, not by the current one. All waiting
after token 1 falls between tokens 1 and 2: for the KV transfer, for prompts that reached the decode
node earlier, and for a place in the batch.

`SideBySide`: a request in multiplexed mode, where a node computes prompts beside decodes. As
between two nodes, prompts wait for prompts, and streams for streams; nothing is handed off. How
fast either is with its share of the cores, nodes learn by the correction of their step times. A
prompt is begun when its stream has a place, so a wait for one comes before token 1.
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
from coordinator.routing.placement import Newcomer
from coordinator.routing.sides import USUAL_TPOT_S, USUAL_TTFT_S, score
from pdserve._native import FleetView
from pdserve.measured.output_lengths import Kind, remaining

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
        self,
        fleet: Fleet,
        books: Books,
        request: GenerationRequest,
        hits: Hits,
        kind: Kind,
        now_s: float,
    ) -> None:
        """`hits`, `kind`: of its prompt, and of its answer."""
        self.request = request
        self.hits = hits
        self.kind = kind
        self.now_s = now_s
        self.num_tokens = request.prompt.num_tokens + len(request.output_token_ids)
        self.usual_tokens = books.lengths.expected(kind)
        left = remaining(self.usual_tokens, request.sampling, len(request.output_token_ids))
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
        if not len(self.hits.slots):
            return 0
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


class OneNode:
    """Predictions for a few nodes; arrays are in the order of `slots`."""

    def __init__(self, outlook: Outlook, slots: list[int]) -> None:
        self.slots: Ints = np.array(slots)
        self._slots = slots
        self._outlook = outlook
        slo = outlook.request.slo
        outcomes = np.empty((7, len(slots)))
        outlook.view.on_one_node(
            self.slots,
            outlook.queue_s,
            outlook.prompt_s,
            outlook.queues.num_prompts,
            slo.ttft_s or USUAL_TTFT_S,
            slo.tpot_s or USUAL_TPOT_S,
            outlook.output_tokens,
            outcomes,
        )
        self.begins_s: Floats = outcomes[0]  # when the prompt's prefill begins
        self.ttft_s: Floats = outcomes[1]
        self.tpot_s: Floats = outcomes[2]
        self._stalled_s: Floats = outcomes[3]  # part of the TPOT spent behind chunks of prompts
        self.harm: Floats = outcomes[4]  # to other requests, in units of their promises
        self._is_full: Floats = outcomes[5]  # 1: no place in the batch when token 1 is there
        self._crowds: Floats = outcomes[6]  # 1: none at some time until its end

    @property
    def ttft_or_full_s(self) -> Floats:
        """`ttft_s`, plus a large penalty where there is no place in the batch."""
        return self.ttft_s + NO_PLACE_S * self._is_full

    def has_place(self, index: int) -> bool:
        """Return whether the batch has a place from token 1 to the end.

        Else the request would wait, or take a place that another one on its way there needs.
        """
        return not self._crowds[index]

    def index(self, slot: int) -> int | None:
        """Return the index of a slot in `slots`; None if it is not among them."""
        return self._slots.index(slot) if slot in self._slots else None

    def times(self, index: int) -> Times:
        """Return the times at one node; a wait for a place comes before the prompt."""
        ttft_s, tpot_s = float(self.ttft_s[index]), float(self.tpot_s[index])
        if self._is_full[index]:
            wait_s, pace_s = self._outlook.view.place(
                self._slots[index], float(self.begins_s[index])
            )
            ttft_s += wait_s
            tpot_s = pace_s + float(self._stalled_s[index])
        return Times(ttft_s, tpot_s)


class HandedOff:
    """Predictions for all decode nodes, given the prefill node; arrays are by slot."""

    def __init__(self, outlook: Outlook, prefill: int, ttft_s: float, begins_s: Floats) -> None:
        """`begins_s`: the time until a prompt sent to a node now would begin its prefill there."""
        self._outlook = outlook
        self._ttft_s = ttft_s
        self._begins_s = begins_s
        self._handoff_s = outlook.handoffs_s(prefill, ttft_s)
        self._line_s = np.maximum(begins_s - ttft_s, 0.0)
        self.tpot_s: Floats = outlook.paces_s(ttft_s, NO_PLACE_S)
        self.tpot_s += (self._handoff_s + self._line_s) / outlook.num_gaps

    def times(self, decode: int) -> Times:
        """Return the times at one decode node, including the wait for a place."""
        tpot_s = float(self.tpot_s[decode])
        if tpot_s >= NO_PLACE_S:
            ready_s = max(self._ttft_s, float(self._begins_s[decode]))
            wait_s, pace_s = self._outlook.view.place(decode, ready_s)
            held_s = min(wait_s, self._may_hold_s())
            between_s = float(self._handoff_s[decode] + self._line_s[decode]) + wait_s - held_s
            tpot_s = pace_s + between_s / self._outlook.num_gaps
            return Times(self._ttft_s + held_s, tpot_s, wait_s, held_s)
        return Times(self._ttft_s, tpot_s)

    def _may_hold_s(self) -> float:
        """Return how long token 1 may be held back at a node without a place."""
        request = self._outlook.request
        if request.slo.tpot_s <= 0:
            return 0.0
        return max(0.0, request.slo.hold_s - request.waited_s - self._ttft_s)

    def idle_tpot_s(self, decode: int) -> float:
        """Return the TPOT at a decode node with nothing else to do, including the handoff."""
        between_s = float(self._handoff_s[decode])
        return self._outlook.alone_s(decode) + between_s / self._outlook.num_gaps


class SideBySide:
    """Predictions for these nodes; arrays are by slot."""

    def __init__(self, outlook: Outlook, slots: Ints) -> None:
        self._outlook = outlook
        pace_s = outlook.paces_s(float(outlook.ttft_s[slots].min()), NO_PLACE_S)
        self.cost: Floats = score(outlook.request.slo, outlook.ttft_s, pace_s)

    def times(self, slot: int) -> Times:
        """Return the times at one node."""
        outlook, ttft_s = self._outlook, float(self._outlook.ttft_s[slot])
        if outlook.ends_with_token_1:
            return Times(ttft_s, 0.0)
        tpot_s = float(outlook.paces_s(ttft_s, NO_PLACE_S)[slot])
        if tpot_s >= NO_PLACE_S:
            wait_s, tpot_s = outlook.view.place(slot, float(outlook.queue_s[slot]))
            ttft_s += wait_s
        return Times(ttft_s, tpot_s)
