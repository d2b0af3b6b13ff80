"""Decode legs in flight, and what decode nodes will have to do at a moment to come."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from coordinator.registry import Member
from coordinator.routing.fleet import Fleet
from coordinator.routing.forecast import LoadForecast
from coordinator.routing.slots import Ints, SlotArrays
from pdserve.protocol import NodeRole


class Batch(NamedTuple):
    """What nodes decode together: by slot, or by slot and time."""

    requests: Ints
    context: Ints  # tokens


class DecodeLoad(SlotArrays):
    """By slot; our own legs as planned, others' as the node has last reported them."""

    def __init__(self, fleet: Fleet, now_s: float) -> None:
        super().__init__()
        n = self.capacity
        self.forecast = LoadForecast(n, now_s)
        self.legs: Ints = np.zeros(n, np.int64)  # ours, from dispatch to end
        self.others: Ints = np.zeros(n, np.int64)
        self.others_context: Ints = np.zeros(n, np.int64)
        # Of our legs, those that the node counts among its requests, and their context.
        self._active: Ints = np.zeros(n, np.int64)
        self._active_context: Ints = np.zeros(n, np.int64)
        self._fleet = fleet

    def reserve(self, slot: int) -> None:
        """As SlotArrays, with the calendar."""
        super().reserve(slot)
        self.forecast.reserve(self.capacity)

    def at(self, now_s: float, moment_s: float) -> Batch:
        """Every node's at a moment."""
        requests, context = self.forecast.at(now_s, moment_s)
        return Batch(requests + self.others, context + self.others_context)

    def legs_with_others(self) -> Ints:
        """Decode legs by slot, as far as we or the node know."""
        return self.legs + self.others

    def activate(self, slot: int, sign: int, context: int) -> None:
        """A leg of ours has become a request there (1), or is none any more (-1)."""
        self._active[slot] += sign
        self._active_context[slot] += sign * context

    def reported(self, member: Member) -> None:
        """What the node has beyond ours is others'."""
        slot, load, hello = member.slot, member.load, member.hello
        self.reserve(slot)
        used_blocks = max(hello.num_blocks - load.free_blocks - load.pinned_blocks, 0)
        requests = load.running_requests + load.waiting_requests
        if member.role is NodeRole.PREFILL:
            requests = 0  # prompts, as a rule: what others have it decode, it does not tell
        context = used_blocks * hello.layout.block_size
        self.others[slot] = max(requests - int(self._active[slot]), 0)
        # Blocks are of others only if somebody else's requests are there.
        is_others = self.others[slot] > 0
        self.others_context[slot] = (
            max(context - int(self._active_context[slot]), 0) if is_others else 0
        )

    def clear(self, slot: int) -> None:
        """The node is gone."""
        self.forecast.clear(slot)
        self.legs[slot] = self.others[slot] = self.others_context[slot] = 0
        self._active[slot] = self._active_context[slot] = 0
