"""Which request to preempt when no block is free, or for a request that must have its place.

The lowest priority is preempted first; within a priority, the request whose next token is due last,
that is with the most slack (TaiChi, Kairos). A request that was preempted `max_preemptions` times
is spared as long as there is another candidate, so that no request starves. If there is none, it
gives way again: otherwise whoever has priority over it would wait until it ends. Beside a long
prompt that another engine computes at the moment (multiplexed mode), a stream that needs a block
may have to give way itself: the prompt is no candidate until its step has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.engine.due_times import next_due_s
from pdserve.engine.request import Request


@dataclass(frozen=True, slots=True)
class Victims:
    """The preemption rule and its setting."""

    max_preemptions: int = 3

    def choose(self, running: Iterable[Request], needy: Request) -> Request:
        """Return the request to preempt for a block that `needy` must have; may be `needy` itself.

        `needy` is running. Requests of higher priority are never chosen. If all candidates have
        reached `max_preemptions`, the youngest of the lowest priority is chosen, so that the oldest
        one completes, then the next.
        """
        priority = needy.targets.priority
        candidates = [r for r in running if _can_give_way(r) and r.targets.priority <= priority]
        fresh = [r for r in candidates if r.num_preemptions < self.max_preemptions]
        if fresh:
            return min(fresh, key=_spared)
        return min(candidates, key=_age, default=needy)

    def in_order(self, running: Iterable[Request]) -> list[Request]:
        """Return the requests that may be preempted at all, in order of preemption."""

        def key(request: Request) -> tuple[int, bool, tuple[int, float, float]]:
            is_spared = request.num_preemptions >= self.max_preemptions
            return request.targets.priority, is_spared, _spared(request)

        return sorted(filter(_can_give_way, running), key=key)


def _can_give_way(request: Request) -> bool:
    """Whether a request may be preempted.

    Prefill legs may not: their blocks are already announced to other nodes, and they end soon.
    """
    return not request.is_prefill_leg


def _spared(request: Request) -> tuple[int, float, float]:
    """Sort key; the smallest is preempted first. Without SLOs, the last to arrive (as in vLLM)."""
    return request.targets.priority, -next_due_s(request), -request.lifecycle.received_s


def _age(request: Request) -> tuple[int, float]:
    return request.targets.priority, -request.lifecycle.received_s
