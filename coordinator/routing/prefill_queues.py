"""Prompts sent to nodes and not computed yet: what goes before the next one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from coordinator.registry import Member
from coordinator.routing.fleet import Fleet
from coordinator.routing.slots import Floats, Ints, SlotArrays
from pdserve.protocol import Slo


class ServiceClass(NamedTuple):
    """Prompts that nodes treat alike."""

    priority: int
    name: str
    weight: float

    @classmethod
    def of(cls, slo: Slo) -> ServiceClass:
        """Whose requests have this promise."""
        return cls(slo.priority, slo.name, slo.weight)


@dataclass(frozen=True, slots=True)
class PendingPrompt:
    """One prompt in a node's queue."""

    service_class: ServiceClass
    seconds: float  # to compute it alone
    tokens: int  # all of it: a node that reports its queue does not know yet what is cached


@dataclass(slots=True)
class _Queue:
    """One life's queue, in order of dispatch."""

    member: Member
    prompts: dict[str, PendingPrompt] = field(default_factory=dict)  # by request id

    def head(self) -> PendingPrompt | None:
        """The prompt that is being computed: of the highest priority the oldest."""
        prompts = self.prompts.values()
        return max(prompts, key=lambda prompt: prompt.service_class.priority, default=None)


class PrefillQueues(SlotArrays):
    """By slot, in seconds that the node is predicted to need."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        n = self.capacity
        self.num_prompts: Ints = np.zeros(n, np.int64)
        self.tokens: Ints = np.zeros(n, np.int64)
        self._others_s: Floats = np.zeros(n)
        # With a column for each class; of the prompt at the head, only its own is not 0.
        self._seconds: Floats = np.zeros((n, 0))
        self._head_s: Floats = np.zeros((n, 0))
        self._head_since: Floats = np.zeros((n, 1))
        self._head_priority: Ints = np.zeros(n, np.int64)
        self._columns: dict[ServiceClass, int] = {}
        self._queues: dict[int, _Queue] = {}
        self._fleet = fleet

    def all_s(self, now_s: float) -> Floats:
        """Seconds of prefill by slot, whoever waits for them."""
        total_s: Floats = self._left_s(now_s).sum(axis=1) + self._others_s
        return total_s

    def before_s(self, newcomer: ServiceClass, own_s: Floats, now_s: float) -> Floats:
        """Seconds of prefill by slot that go before a prompt which itself takes `own_s` there.

        All of what has a higher priority, and of what is of its class. Classes of equal priority
        share a node by their weights: while it does this class's part up to the newcomer's end, it
        does no more than in proportion of another one's (as in fair queueing).
        """
        column = self._column(newcomer)
        left_s = self._left_s(now_s)
        before_s = left_s[:, column] + self._others_s
        of_class_s = left_s[:, column] + own_s
        for other, at in self._columns.items():
            if other.priority > newcomer.priority:
                before_s += left_s[:, at]
            elif other.priority == newcomer.priority and at != column:
                share = other.weight / newcomer.weight
                before_s += np.minimum(left_s[:, at], share * of_class_s)
        return before_s

    def tokens_with_others(self) -> Ints:
        """Prompt tokens by slot that are not computed yet, as far as we or the node know."""
        reported = self._fleet.queued_tokens[: self.capacity]
        return np.maximum(self.tokens, reported)

    def push(self, member: Member, request_id: str, prompt: PendingPrompt, now_s: float) -> None:
        """A prompt has been sent there."""
        slot = member.slot
        self.reserve(slot)
        queue = self._queues.get(slot)
        if queue is None:
            queue = self._queues[slot] = _Queue(member)
        queue.prompts[request_id] = prompt
        self._add(slot, prompt, 1)
        priority = prompt.service_class.priority
        if len(queue.prompts) == 1 or priority > self._head_priority[slot]:
            self._set_head(slot, prompt, now_s)

    def pop(self, member: Member, request_id: str, now_s: float) -> bool:
        """A prompt has been computed, or given up; False: it was not pending."""
        queue = self._queues.get(member.slot)
        if queue is None or queue.member is not member or request_id not in queue.prompts:
            return False
        self._add(member.slot, queue.prompts.pop(request_id), -1)
        self._set_head(member.slot, queue.head(), now_s)
        return True

    def reported(self, member: Member) -> None:
        """What the node has beyond ours is others'; they go first, for all we know."""
        slot = member.slot
        self.reserve(slot)
        others = max(member.load.queued_tokens - int(self.tokens[slot]), 0)
        self._others_s[slot] = others * self._fleet.token_s(slot)

    def clear(self, slot: int) -> None:
        """The node is gone."""
        self._queues.pop(slot, None)
        self._seconds[slot] = 0.0
        self.num_prompts[slot] = self.tokens[slot] = 0
        self._others_s[slot] = self._head_s[slot] = 0.0

    def _add(self, slot: int, prompt: PendingPrompt, sign: int) -> None:
        column = self._column(prompt.service_class)
        self._seconds[slot, column] += sign * prompt.seconds
        self.tokens[slot] += sign * prompt.tokens
        self.num_prompts[slot] += sign
        if self.num_prompts[slot] == 0:
            self._seconds[slot] = 0.0  # and not what rounding has left

    def _set_head(self, slot: int, prompt: PendingPrompt | None, now_s: float) -> None:
        self._head_since[slot] = now_s
        self._head_s[slot] = 0.0
        if prompt is not None:
            self._head_s[slot, self._column(prompt.service_class)] = prompt.seconds
            self._head_priority[slot] = prompt.service_class.priority

    def _left_s(self, now_s: float) -> Floats:
        """By slot and class, less what has been computed of the prompt at the head."""
        done_s = np.minimum(now_s - self._head_since, self._head_s)
        return np.maximum(self._seconds - done_s, 0.0)

    def _column(self, service_class: ServiceClass) -> int:
        column = self._columns.setdefault(service_class, len(self._columns))
        if column == self._seconds.shape[1]:
            self._seconds = np.pad(self._seconds, ((0, 0), (0, 1)))
            self._head_s = np.pad(self._head_s, ((0, 0), (0, 1)))
        return column
