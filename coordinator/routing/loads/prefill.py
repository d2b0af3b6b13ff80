"""Prompts that were sent to nodes and are not computed yet: the queue before the next prompt.

A prompt that can no longer be in time does not delay one of its own class that can, where nodes
compute it after that (`NodeHello.late_last`). Under overload most of a queue is such prompts: with
them, every prefill node would seem to be too late for everything, and adaptive mode would leave
them all.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final, NamedTuple

import msgspec
import numpy as np
from msgspec import structs

from coordinator.nodes.registry import Member
from coordinator.routing.fleet import Fleet
from coordinator.routing.loads.slots import Floats, Ints, SlotArrays
from pdserve.protocol import Slo
from pdserve.rules.late import begin_by_s, go_on_by_s

_FEW: Final = 64  # prompts below which nothing is forgotten


class ServiceClass(NamedTuple):
    """Prompts that nodes schedule alike: those of one payer and priority."""

    priority: int
    name: str
    weight: float

    @classmethod
    def of(cls, slo: Slo) -> ServiceClass:
        """Return the service class of requests with this Slo."""
        return cls(slo.priority, slo.payer, slo.weight)


class PendingPrompt(msgspec.Struct, frozen=True):
    """One prompt in a node's queue."""

    service_class: ServiceClass
    seconds: float  # predicted, if computed alone; of one that gave way, what is left of it
    tokens: int  # cached ones included: nodes do not know yet what is cached when they report
    due_s: float = inf  # when its token 1 is promised
    has_begun: bool = False

    @property
    def late_after_s(self) -> float:
        """When it becomes late, unless it is computed by then."""
        if self.has_begun:
            return go_on_by_s(self.due_s, self.seconds)
        return begin_by_s(self.due_s, self.seconds)


@dataclass(slots=True)
class PromptQueue:
    """The queue of one incarnation of a node, in order of dispatch."""

    member: Member
    prompts: dict[str, PendingPrompt] = field(default_factory=dict)  # by request id
    late: set[str] = field(default_factory=set)  # those that can no longer be in time
    head: str | None = None  # the one being computed
    _numbers: dict[str, int] = field(default_factory=dict)  # by request id: in this order
    # Heap: priority, negated; is late; number; request id. Some are not there any more, or as late.
    _ranked: list[tuple[int, bool, int, str]] = field(default_factory=list)
    _num_added: int = 0

    def add(self, request_id: str, prompt: PendingPrompt) -> None:
        """Add a prompt behind the others."""
        self.prompts[request_id] = prompt
        self._numbers[request_id] = self._num_added
        self._num_added += 1
        self._note(request_id)

    def remove(self, request_id: str) -> None:
        """Remove a prompt, which is not late."""
        del self._numbers[request_id], self.prompts[request_id]

    def set_late(self, request_id: str, is_late: bool) -> None:
        """Note whether a prompt can no longer be in time."""
        (self.late.add if is_late else self.late.discard)(request_id)
        self._note(request_id)

    def next_head(self) -> str | None:
        """Return the oldest prompt of the highest priority, of those that are not late if any."""
        while self._ranked:
            _, is_late, number, request_id = self._ranked[0]
            if self._is_now(request_id, number, is_late):
                return request_id
            heappop(self._ranked)
        return None

    def goes_ahead(self, request_id: str) -> bool:
        """Return whether a prompt that has come is computed now."""
        return self.head is None or self._rank(request_id) < self._rank(self.head)

    def _rank(self, request_id: str) -> tuple[int, bool]:
        return -self.prompts[request_id].service_class.priority, request_id in self.late

    def _note(self, request_id: str) -> None:
        priority, is_late = self._rank(request_id)
        heappush(self._ranked, (priority, is_late, self._numbers[request_id], request_id))
        if len(self._ranked) > 2 * len(self.prompts) + _FEW:
            left = {one for one in self._ranked if self._is_now(one[3], one[2], one[1])}
            self._ranked = list(left)
            heapify(self._ranked)

    def _is_now(self, request_id: str, number: int, is_late: bool) -> bool:
        return self._numbers.get(request_id) == number and is_late == (request_id in self.late)


class PrefillQueues(SlotArrays):
    """Prefill queues by slot, in predicted seconds of the node's time."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        n = self.capacity
        self.num_prompts: Ints = np.zeros(n, np.int64)
        self.tokens: Ints = np.zeros(n, np.int64)
        self._others_s: Floats = np.zeros(n)
        # One column per class. In `_head_s`, only the column of the head's class is not 0.
        self._seconds: Floats = np.zeros((n, 0))
        self._late_s: Floats = np.zeros((n, 0))  # of these, of late prompts
        self._head_s: Floats = np.zeros((n, 0))
        self._head_since: Floats = np.zeros((n, 1))
        # Columns of the classes that have prompts on some node; there may be one per tenant.
        self._columns: dict[ServiceClass, int] = {}
        self._free_columns: list[int] = []
        self._num_of_class: Counter[ServiceClass] = Counter()
        self._queues: dict[int, PromptQueue] = {}
        self._by_time: list[tuple[float, int, str]] = []  # heap: begin_by_s, slot, request id
        self._most_by_time = _FEW  # some are of prompts that were computed
        self._fleet = fleet

    def all_s(self, now_s: float) -> Floats:
        """Return the seconds of queued prefill by slot, of all classes."""
        total_s: Floats = self._left_s(now_s).sum(axis=1) + self._others_s
        return total_s

    def before_s(
        self, newcomer: ServiceClass, own_s: Floats, now_s: float, ttft_s: float = 0.0
    ) -> Floats:
        """Return the seconds of prefill by slot before a new prompt, which itself takes `own_s`.

        This is all queued work of higher priorities and of the prompt's own class, but for what is
        late there, if the prompt itself can be in time (`ttft_s` is promised; 0: nothing). Classes
        of equal priority share a node by their weights: while the node works on this class up to
        the end of the new prompt, it does at most the proportional amount for another one (fair
        queueing).
        """
        self._note_late(now_s)
        left_s = self._left_s(now_s)
        column = self._columns.get(newcomer)
        before_s, of_class_s = self._others_s, own_s
        if column is not None:
            timely_s = np.maximum(left_s[:, column] - self._late_s[:, column], 0.0)
            is_timely = timely_s <= begin_by_s(ttft_s, own_s)
            of_own_s = np.where(is_timely, timely_s, left_s[:, column])
            before_s = of_own_s + before_s
            of_class_s = of_own_s + own_s
        for other, at in self._columns.items():
            if other.priority > newcomer.priority:
                before_s = before_s + left_s[:, at]
            elif other.priority == newcomer.priority and at != column:
                share = other.weight / newcomer.weight
                before_s = before_s + np.minimum(left_s[:, at], share * of_class_s)
        return before_s

    def tokens_with_others(self) -> Ints:
        """Return queued prompt tokens by slot: the larger of our count and the node's report."""
        reported = self._fleet.queued_tokens[: self.capacity]
        return np.maximum(self.tokens, reported)

    def push(self, member: Member, request_id: str, prompt: PendingPrompt, now_s: float) -> None:
        """Add a prompt that was sent to a node."""
        slot = member.slot
        if slot >= self.capacity:
            self.reserve(slot)
        queue = self._queues.get(slot)
        if queue is None:
            queue = self._queues[slot] = PromptQueue(member)
        queue.add(request_id, prompt)
        self._add(slot, prompt, 1)
        self._await_late(queue, request_id, now_s)
        if queue.goes_ahead(request_id):
            self._set_head(queue, request_id, now_s)

    def pop(self, member: Member, request_id: str, now_s: float) -> bool:
        """Remove a prompt that was computed or given up; return False if it was not pending."""
        queue = self._queues.get(member.slot)
        if queue is None or queue.member is not member or request_id not in queue.prompts:
            return False
        prompt = queue.prompts[request_id]
        if request_id in queue.late:
            queue.set_late(request_id, False)
            self._add_late(member.slot, prompt, -1)
        queue.remove(request_id)
        self._add(member.slot, prompt, -1)
        self._set_head(queue, queue.next_head(), now_s)
        return True

    def reported(self, member: Member) -> None:
        """Attribute what a node reports beyond our own prompts to other coordinators.

        Their prompts are assumed to go first, since their order is unknown.
        """
        slot = member.slot
        self.reserve(slot)
        others = max(member.load.queued_tokens - int(self.tokens[slot]), 0)
        self._others_s[slot] = others * self._fleet.token_s(slot)

    def clear(self, slot: int) -> None:
        """Forget the queue of a lost node."""
        queue = self._queues.pop(slot, None)
        for prompt in queue.prompts.values() if queue else ():
            self._count(prompt.service_class, -1)
        self._seconds[slot] = self._late_s[slot] = 0.0
        self.num_prompts[slot] = self.tokens[slot] = 0
        self._others_s[slot] = self._head_s[slot] = 0.0

    def _add(self, slot: int, prompt: PendingPrompt, sign: int) -> None:
        column = self._column(prompt.service_class)
        self._seconds[slot, column] += sign * prompt.seconds
        self._count(prompt.service_class, sign)
        self.tokens[slot] += sign * prompt.tokens
        self.num_prompts[slot] += sign
        if self.num_prompts[slot] == 0:
            self._seconds[slot] = self._late_s[slot] = 0.0  # removes rounding errors

    def _add_late(self, slot: int, prompt: PendingPrompt, sign: int) -> None:
        self._late_s[slot, self._column(prompt.service_class)] += sign * prompt.seconds

    def _await_late(self, queue: PromptQueue, request_id: str, now_s: float) -> None:
        """Note when this prompt becomes late; that it is, if so."""
        prompt, slot = queue.prompts[request_id], queue.member.slot
        if not queue.member.hello.late_last or prompt.due_s == inf:
            return
        if prompt.late_after_s < now_s:
            queue.set_late(request_id, True)
            self._add_late(slot, prompt, 1)
            return
        heappush(self._by_time, (prompt.late_after_s, slot, request_id))
        if len(self._by_time) > self._most_by_time:
            self._forget()

    def _forget(self) -> None:
        """Drop the times at which no pending prompt becomes late any more."""
        self._by_time = [
            (at_s, slot, request_id)
            for at_s, slot, request_id in self._by_time
            if self._becomes_late(at_s, slot, request_id)
        ]
        heapify(self._by_time)
        self._most_by_time = 2 * len(self._by_time) + _FEW

    def _becomes_late(self, at_s: float, slot: int, request_id: str) -> bool:
        """Whether the prompt is still pending, and has not begun or given way since."""
        queue = self._queues.get(slot)
        prompt = queue.prompts.get(request_id) if queue is not None else None
        return prompt is not None and prompt.late_after_s == at_s

    def _note_late(self, now_s: float) -> None:
        """Note which prompts have become late. The one being computed goes on in time."""
        while self._by_time and self._by_time[0][0] < now_s:
            at_s, slot, request_id = heappop(self._by_time)
            if not self._becomes_late(at_s, slot, request_id):
                continue
            queue = self._queues[slot]
            if request_id != queue.head:
                queue.set_late(request_id, True)
                self._add_late(slot, queue.prompts[request_id], 1)

    def _set_head(self, queue: PromptQueue, head: str | None, now_s: float) -> None:
        if head == queue.head:
            return
        slot, given_way = queue.member.slot, queue.head
        queue.head = head
        if given_way is not None and given_way in queue.prompts:
            prompt = queue.prompts[given_way]
            left_s = max(0.0, prompt.seconds - (now_s - float(self._head_since[slot, 0])))
            self._change(queue, given_way, structs.replace(prompt, seconds=left_s), now_s)
        self._head_since[slot] = now_s
        self._head_s[slot] = 0.0
        if head is not None:
            prompt = queue.prompts[head]
            self._head_s[slot, self._column(prompt.service_class)] = prompt.seconds
            if not prompt.has_begun:
                self._change(queue, head, structs.replace(prompt, has_begun=True), now_s)

    def _change(
        self, queue: PromptQueue, request_id: str, prompt: PendingPrompt, now_s: float
    ) -> None:
        """Note what is left of a prompt, and anew whether it is late."""
        slot, before = queue.member.slot, queue.prompts[request_id]
        if request_id in queue.late:
            queue.set_late(request_id, False)
            self._add_late(slot, before, -1)
        queue.prompts[request_id] = prompt
        self._seconds[slot, self._column(prompt.service_class)] += prompt.seconds - before.seconds
        self._await_late(queue, request_id, now_s)

    def _left_s(self, now_s: float) -> Floats:
        """Return queued seconds [slot, class], less what the head prompt has had so far."""
        done_s = np.minimum(now_s - self._head_since, self._head_s)
        return np.maximum(self._seconds - done_s, 0.0)

    def _column(self, service_class: ServiceClass) -> int:
        column = self._columns.get(service_class)
        if column is None:
            if not self._free_columns:
                self._free_columns.append(self._seconds.shape[1])
                self._seconds = np.pad(self._seconds, ((0, 0), (0, 1)))
                self._late_s = np.pad(self._late_s, ((0, 0), (0, 1)))
                self._head_s = np.pad(self._head_s, ((0, 0), (0, 1)))
            column = self._columns[service_class] = self._free_columns.pop()
        return column

    def _count(self, service_class: ServiceClass, sign: int) -> None:
        """Change a class's number of prompts; free its column when none is left."""
        self._num_of_class[service_class] += sign
        if self._num_of_class[service_class] == 0:
            del self._num_of_class[service_class]
            column = self._columns.pop(service_class)
            self._seconds[:, column] = self._late_s[:, column] = 0.0
            self._head_s[:, column] = 0.0
            self._free_columns.append(column)
