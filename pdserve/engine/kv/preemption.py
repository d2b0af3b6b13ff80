"""Bookkeeping of preempted requests: how their KV comes back, and when to admit others again.

A preempted request's full blocks stay in the prefix cache under their hashes, and in the host tier
if there is one: blocks are written to the tier when they become idle, so they are swapped out
already. Blocks that have been overwritten by the time there is room again are restored in the way
that is predicted to be fastest: from the tier (swap), from the node that prefilled them (re-pull),
or by recomputation. The node does the first two, with the requests in `to_recall`; recomputation
needs no special action.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.engine.request import Request


@dataclass(slots=True)
class PreemptionStatistics:
    """Counters of preemptions and of how KV was restored."""

    for_blocks: int = 0  # preemptions because a stream could not get a block
    for_priority: int = 0  # preemptions in favour of a request of higher priority
    recalls: int = 0  # preempted requests whose KV was fetched before readmission
    swapped_tokens: int = 0  # of preempted requests, restored from the host tier
    pulled_tokens: int = 0  # of preempted requests, pulled from another node
    cached_tokens: int = 0  # found in the pool at readmission, fetched ones included
    computed_tokens: int = 0  # not found at readmission, and so recomputed

    @property
    def total(self) -> int:
        """Number of preemptions."""
        return self.for_blocks + self.for_priority


CouldFetch = Callable[[Request], bool]
"""Whether KV of a preempted request is elsewhere; asked when there is room for the request."""


def all_recomputed(_: Request) -> bool:
    """The default `CouldFetch`: no KV is elsewhere."""
    return False


class Preemptions:
    """The preempted requests of one engine."""

    def __init__(self, block_size: int, could_fetch: CouldFetch) -> None:
        self.statistics = PreemptionStatistics()
        self.to_recall: list[Request] = []  # their KV is to be fetched; the loop takes them out
        self.away: set[Request] = set()  # being recalled: in no queue, without blocks
        self._could_fetch = could_fetch
        self._unasked: set[Request] = set()  # not asked for since their last preemption
        self._block_size = block_size
        self._num_closed_steps = 0
        self._closed_priority = 0

    def preempted(self, request: Request, *, for_priority: bool) -> None:
        """Record that a request was preempted and has lost its blocks."""
        request.num_preemptions += 1
        self._unasked.add(request)
        if for_priority:
            self.statistics.for_priority += 1
            return
        self.statistics.for_blocks += 1
        # Within block_size steps, every stream takes one more block. Blocks that are still free
        # after that stay free.
        was_closed = self._num_closed_steps > 0
        self._num_closed_steps = self._block_size
        priority = request.targets.priority
        self._closed_priority = max(self._closed_priority, priority) if was_closed else priority

    def steps_planned(self, count: int = 1) -> None:
        """Count steps since the last preemption."""
        self._num_closed_steps = max(0, self._num_closed_steps - count)

    def keeps_out(self, request: Request, *, is_alone: bool) -> bool:
        """Whether a request must wait because of a recent preemption.

        A request admitted right after a preemption would cause the next one. Newcomers also wait
        for requests that are being recalled, which have waited for longer. Requests of higher
        priority are not kept out; nor does the first rule hold if no stream is here (`is_alone`).
        """
        priority = request.targets.priority
        if self._num_closed_steps > 0 and not is_alone and priority <= self._closed_priority:
            return True
        return request.num_preemptions == 0 and any(
            priority <= other.targets.priority for other in self.away
        )

    def calls_back(self, request: Request) -> bool:
        """Whether a request's KV is being recalled. Asks `could_fetch` once per preemption."""
        if request not in self._unasked:
            return False
        self._unasked.discard(request)
        if not self._could_fetch(request):
            return False
        self.statistics.recalls += 1
        self.to_recall.append(request)
        self.away.add(request)
        return True

    def came_back(self, request: Request) -> None:
        """Record that a preempted request has blocks again, and how much of its KV was found."""
        self.statistics.cached_tokens += request.num_computed_tokens
        self.statistics.computed_tokens += request.num_uncomputed_tokens

    def forget(self, request: Request) -> None:
        """Drop a request that has ended."""
        self._unasked.discard(request)
        self.away.discard(request)
