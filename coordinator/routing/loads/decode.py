"""Decode legs in flight, and the decode batches that are predicted for a future time.

A request joins a decode batch only when its prefill is over. A router that decides by the current
batches would send everything to the node that is emptiest now and fullest then, and the two pools
would oscillate against each other (Mooncake, section 6). So every leg is entered in a calendar,
from the time it is expected to join to the time it is expected to end; the load at a given time is
one column of the calendar. The calendar is a ring of time buckets. The last bucket stands for
everything later: a leg that is planned beyond it stays in it until it is planned again.

Some streams would give their places to a new request. Nodes preempt streams of lower priorities,
and those of a flood of equal priority that has more places than its share
(`decode_node/policies/line.py`). So a request does not wait until such streams end, however many
there are. A payer counts as a flood if the places would not hold its requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import NamedTuple

import msgspec
import numpy as np

from coordinator.nodes.registry import Member
from coordinator.routing.fleet import Fleet
from coordinator.routing.loads.prefill import ServiceClass
from coordinator.routing.loads.slots import Floats, Ints, SlotArrays
from pdserve.protocol import NodeRole

BUCKET_S = 0.1
NUM_BUCKETS = 256


class Plan(msgspec.Struct, frozen=True):
    """One leg in the calendar: buckets [first, end), counted from the clock's zero."""

    slot: int
    first: int
    end: int | None  # None: beyond the horizon
    num_tokens: int  # context


class LoadForecast:
    """Requests and context tokens by bucket and slot; a change costs one or two slice updates."""

    bucket_s = BUCKET_S

    def __init__(self, num_slots: int, now_s: float) -> None:
        self.requests: Ints = np.zeros((NUM_BUCKETS, num_slots), np.int64)
        self.tokens: Ints = np.zeros((NUM_BUCKETS, num_slots), np.int64)
        self.present = _bucket(now_s)  # the present moment's bucket, counted from zero

    def reserve(self, num_slots: int) -> None:
        """Grow the arrays to `num_slots` slots."""
        num_new = num_slots - self.requests.shape[1]
        if num_new > 0:
            self.requests = np.pad(self.requests, ((0, 0), (0, num_new)))
            self.tokens = np.pad(self.tokens, ((0, 0), (0, num_new)))

    def add(self, slot: int, now_s: float, join_s: float, end_s: float, num_tokens: int) -> Plan:
        """Enter a leg that is expected to decode from `join_s` to `end_s`.

        `num_tokens` is its average context.
        """
        self._advance(now_s)
        last = self.present + NUM_BUCKETS - 1
        first = min(max(_bucket(join_s), self.present), last)
        end = max(_bucket(end_s), first) + 1
        plan = Plan(slot, first, end if end <= last else None, num_tokens)
        self._change(plan, 1)
        return plan

    def remove(self, plan: Plan, now_s: float) -> None:
        """Remove a leg that has ended or is to be planned again."""
        self._advance(now_s)
        self._change(plan, -1)

    @contextmanager
    def without(self, plan: Plan, now_s: float) -> Iterator[None]:
        """Take a leg out of the calendar within the context."""
        self.remove(plan, now_s)
        try:
            yield
        finally:
            self._change(plan, 1)

    def has_begun(self, plan: Plan, now_s: float) -> bool:
        """Return whether the leg was expected to have joined the batch by now."""
        return plan.first <= _bucket(now_s)

    def is_over(self, plan: Plan, now_s: float) -> bool:
        """Return whether the leg was expected to have ended by now."""
        return plan.end is not None and plan.end <= _bucket(now_s)

    def over_at_s(self, plan: Plan) -> float:
        """Return when `is_over` begins to hold."""
        return inf if plan.end is None else plan.end * BUCKET_S

    def at(self, now_s: float, moment_s: float) -> tuple[Ints, Ints]:
        """Return (requests, context tokens) by slot at a future time."""
        self._advance(now_s)
        ahead = min(max(_bucket(moment_s) - self.present, 0), NUM_BUCKETS - 1)
        column = (self.present + ahead) % NUM_BUCKETS
        return self.requests[column], self.tokens[column]

    def is_busy(self, slot: int, now_s: float) -> bool:
        """Return whether a slot has requests now."""
        self._advance(now_s)
        return bool(self.requests[self.present % NUM_BUCKETS, slot])

    def advanced(self, now_s: float) -> LoadForecast:
        """Advance `present` to `now_s`, and return self."""
        self._advance(now_s)
        return self

    def clear(self, slot: int) -> None:
        """Remove all plans of a slot."""
        self.requests[:, slot] = self.tokens[:, slot] = 0

    def _change(self, plan: Plan, sign: int) -> None:
        horizon = self.present + NUM_BUCKETS
        first, end = max(plan.first, self.present), plan.end or horizon
        if first >= end:
            return
        a, b = first % NUM_BUCKETS, end % NUM_BUCKETS
        for part in (slice(a, b),) if a < b else (slice(a, None), slice(0, b)):
            requests, tokens = self.requests[part, plan.slot], self.tokens[part, plan.slot]
            requests += sign  # views: nothing is assigned to the whole arrays
            tokens += sign * plan.num_tokens

    def _advance(self, now_s: float) -> None:
        """Reuse the buckets that have passed as the latest ones, with the last bucket's load."""
        bucket = _bucket(now_s)
        if bucket <= self.present:
            return
        num_passed = min(bucket - self.present, NUM_BUCKETS)
        last = (self.present - 1) % NUM_BUCKETS
        passed = np.arange(self.present, self.present + num_passed) % NUM_BUCKETS
        self.requests[passed] = self.requests[last]
        self.tokens[passed] = self.tokens[last]
        self.present = bucket


def _bucket(moment_s: float) -> int:
    return int(moment_s // BUCKET_S)


class DecodeShares(SlotArrays):
    """Our own decode legs, by slot and service class."""

    def __init__(self) -> None:
        super().__init__()
        self._legs: Ints = np.zeros((self.capacity, 0), np.int64)
        self._columns: dict[ServiceClass, int] = {}  # of the classes that have legs
        self._free_columns: list[int] = []
        self._num_of_class: Counter[ServiceClass] = Counter()

    def add(self, slot: int, service_class: ServiceClass, sign: int) -> None:
        """Count a leg (sign 1), or no longer (-1)."""
        if slot >= self.capacity:
            self.reserve(slot)
        column = self._column(service_class)
        self._legs[slot, column] += sign
        self._num_of_class[service_class] += sign
        if self._num_of_class[service_class] == 0:
            del self._num_of_class[service_class], self._columns[service_class]
            self._free_columns.append(column)

    def may_yield(self, newcomer: ServiceClass) -> bool:
        """Return whether there are requests that could give their places to a new one at all."""
        for other in self._columns:
            if other.priority <= newcomer.priority and other != newcomer:
                return True
        return False

    def yielding(self, newcomer: ServiceClass, batch: Ints, max_batch: Ints) -> Ints:
        """Return how many requests of a batch would give their places to a new one, by slot.

        `batch`: the requests that are expected in it now, by slot, of which some may have given
        their places to earlier ones; `max_batch`: its places.
        """
        own = self._columns.get(newcomer)
        own_legs = 0 if own is None else self._legs[:, own]
        num_yielding: Ints = np.zeros(self.capacity, np.int64)
        for other, column in self._columns.items():
            if other.priority < newcomer.priority:
                num_yielding += self._legs[:, column]
            elif other.priority == newcomer.priority and column != own:
                legs = self._legs[:, column]
                is_flood = legs + own_legs > max_batch
                theirs = np.minimum(legs, batch - own_legs) * is_flood
                share: Floats = np.ceil((own_legs + 1) * (other.weight / newcomer.weight))
                kept = np.minimum(max_batch - own_legs, share.astype(np.int64))
                num_yielding += np.maximum(theirs - np.maximum(kept, 0), 0)
        return num_yielding

    def clear(self, slot: int) -> None:
        """Forget the legs of a lost node."""
        for service_class, column in list(self._columns.items()):
            if num_legs := int(self._legs[slot, column]):
                self.add(slot, service_class, -num_legs)

    def _column(self, service_class: ServiceClass) -> int:
        column = self._columns.get(service_class)
        if column is None:
            if not self._free_columns:
                self._free_columns.append(self._legs.shape[1])
                self._legs = np.pad(self._legs, ((0, 0), (0, 1)))
            column = self._columns[service_class] = self._free_columns.pop()
        return column


class PredictedBatch(NamedTuple):
    """Decode batches, by slot, or by slot and time."""

    requests: Ints
    context: Ints  # tokens


class DecodeLoad(SlotArrays):
    """Decode load by slot: our own legs as planned, other coordinators' as last reported."""

    def __init__(self, fleet: Fleet, now_s: float) -> None:
        super().__init__()
        n = self.capacity
        self.forecast = LoadForecast(n, now_s)
        self.legs: Ints = np.zeros(n, np.int64)  # our own, from dispatch to end
        self.others: Ints = np.zeros(n, np.int64)
        self.others_context: Ints = np.zeros(n, np.int64)
        # Our legs that the node counts among its requests, and their context in tokens.
        self._active: Ints = np.zeros(n, np.int64)
        self._active_context: Ints = np.zeros(n, np.int64)
        self.shares = DecodeShares()
        self._fleet = fleet

    def reserve(self, slot: int) -> None:
        """Grow the arrays, the shares and the calendar."""
        super().reserve(slot)
        self.shares.reserve(slot)
        self.forecast.reserve(self.capacity)

    def at(self, now_s: float, moment_s: float) -> PredictedBatch:
        """Return every node's predicted batch at `moment_s`."""
        requests, context = self.forecast.at(now_s, moment_s)
        return PredictedBatch(requests + self.others, context + self.others_context)

    def has_requests(self, slot: int, now_s: float) -> bool:
        """Return whether a node is decoding anything now."""
        return bool(self.others[slot]) or self.forecast.is_busy(slot, now_s)

    def legs_with_others(self) -> Ints:
        """Return decode legs by slot: our own, and others' as reported."""
        return self.legs + self.others

    def yielding(self, newcomer: ServiceClass, now_s: float) -> Ints | None:
        """Return how many requests of each batch would give their places to a new request.

        None: none of any batch.
        """
        if not self.shares.may_yield(newcomer):
            return None
        max_batch = self._fleet.tables.max_batch[self._fleet.row]
        return self.shares.yielding(newcomer, self.at(now_s, now_s).requests, max_batch)

    def activate(self, slot: int, sign: int, context: int) -> None:
        """Count one of our legs as a request at the node (sign 1), or no longer (-1)."""
        self._active[slot] += sign
        self._active_context[slot] += sign * context

    def reported(self, member: Member) -> None:
        """Attribute what a node reports beyond our own legs to other coordinators."""
        slot, load, hello = member.slot, member.load, member.hello
        self.reserve(slot)
        used_blocks = max(hello.num_blocks - load.free_blocks - load.pinned_blocks, 0)
        requests = load.running_requests + load.waiting_requests
        if member.role is NodeRole.PREFILL:
            requests = 0  # mostly prompts; what it decodes for others is not in its report
        held = hello.layout.tokens_in(used_blocks)
        context = round(hello.layout.tokens_of_held(held, requests))
        self.others[slot] = max(requests - int(self._active[slot]), 0)
        # Blocks count as others' only if others have requests there.
        is_others = self.others[slot] > 0
        self.others_context[slot] = (
            max(context - int(self._active_context[slot]), 0) if is_others else 0
        )

    def clear(self, slot: int) -> None:
        """Forget the load of a lost node."""
        self.forecast.clear(slot)
        self.shares.clear(slot)
        self.legs[slot] = self.others[slot] = self.others_context[slot] = 0
        self._active[slot] = self._active_context[slot] = 0
