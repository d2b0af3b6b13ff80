"""What became of preempted requests, and when others may be let in again.

A preempted request's full blocks stay in the prefix cache under their hashes, and in the host tier
if there is one: written there when they fell idle, they are swapped out already. What another
request has overwritten by the time that there is room again comes back in whichever way is forecast
to be the quickest: from the tier (swap), from the node that prefilled it (re-pull), or by computing
it again. The node sees to the first two (`recall`); computing needs nobody's help.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.engine.request import Request


@dataclass(slots=True)
class PreemptionStatistics:
    """Every field only grows."""

    for_blocks: int = 0  # preempted since a stream could not grow
    for_priority: int = 0  # since somebody more important came
    recalls: int = 0  # whose KV was fetched before they were let in again
    swapped_tokens: int = 0  # of preempted requests, brought up from the host tier
    pulled_tokens: int = 0  # pulled from another node
    cached_tokens: int = 0  # found in the pool by then, fetched ones included
    computed_tokens: int = 0  # not found: computed again

    @property
    def total(self) -> int:
        """Preemptions."""
        return self.for_blocks + self.for_priority


def _nobody(_: Request) -> bool:
    """For engines whose node fetches nothing."""
    return False


class Preemptions:
    """Of one engine."""

    def __init__(self, block_size: int) -> None:
        self.statistics = PreemptionStatistics()
        self.recall: Callable[[Request], bool] = _nobody
        """Asked when there is room again for a preempted request: True if its KV is being fetched,
        after which it is submitted once more."""
        self.away: set[Request] = set()  # being recalled: in no queue, without blocks
        self._unasked: set[Request] = set()  # not recalled since they were preempted
        self._block_size = block_size
        self._num_closed_steps = 0
        self._closed_priority = 0

    def preempted(self, request: Request, *, for_priority: bool) -> None:
        """It has lost its blocks."""
        request.num_preemptions += 1
        self._unasked.add(request)
        if for_priority:
            self.statistics.for_priority += 1
            return
        self.statistics.for_blocks += 1
        # Within so many steps every stream takes one block more: what is free then stays free.
        was_closed = self._num_closed_steps > 0
        self._num_closed_steps = self._block_size
        priority = request.targets.priority
        self._closed_priority = max(self._closed_priority, priority) if was_closed else priority

    def step_planned(self) -> None:
        """One step more since the last preemption."""
        self._num_closed_steps = max(0, self._num_closed_steps - 1)

    def keeps_out(self, request: Request, *, is_alone: bool) -> bool:
        """Whether to wait: whoever is let in right after a preemption causes the next one.

        Those who come back, too, have waited for longer than newcomers. More important requests
        are not kept out; neither is one beside which nothing runs.
        """
        priority = request.targets.priority
        if self._num_closed_steps > 0 and not is_alone and priority <= self._closed_priority:
            return True
        return request.num_preemptions == 0 and any(
            priority <= other.targets.priority for other in self.away
        )

    def calls_back(self, request: Request) -> bool:
        """Whether it comes back by `recall`; asked once for each time it was preempted."""
        if request not in self._unasked:
            return False
        self._unasked.discard(request)
        if not self.recall(request):
            return False
        self.statistics.recalls += 1
        self.away.add(request)
        return True

    def came_back(self, request: Request) -> None:
        """A preempted request has blocks again, the first of them with its KV in them."""
        self.statistics.cached_tokens += request.num_computed_tokens
        self.statistics.computed_tokens += request.num_uncomputed_tokens

    def forget(self, request: Request) -> None:
        """It has ended."""
        self._unasked.discard(request)
        self.away.discard(request)
