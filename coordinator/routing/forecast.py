"""A forecast of the load of decode nodes.

A request joins a decode batch only when its prefill is over. A router that decides by the current
batches would send everything to the node that is emptiest now and fullest then, and the two pools
would oscillate against each other (Mooncake, section 6). So every leg is entered in a calendar,
from the time it is expected to join to the time it is expected to end; the load at a given time is
one column of the calendar.

The calendar is a ring of time buckets. The last bucket stands for everything later: a leg that is
planned beyond it stays in it until it is planned again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from coordinator.routing.loads.slots import Ints

BUCKET_S = 0.1
NUM_BUCKETS = 256


@dataclass(frozen=True, slots=True)
class Plan:
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
