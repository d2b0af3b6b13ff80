"""Who gives way when there is no block left, or when somebody more important comes.

The lowest priority first, then whoever can spare the time best: the most slack until its next token
is due (TaiChi, Kairos). One that has given way `max_preemptions` times already is spared as long as
there is anybody else, so that nobody starves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.engine.pace import next_due_s
from pdserve.engine.request import Request


@dataclass(frozen=True, slots=True)
class Victims:
    """The rule, with its one setting."""

    max_preemptions: int = 3

    def choose(self, running: Iterable[Request], needy: Request) -> Request:
        """Who gives way for a block that `needy`, which is running, must have; perhaps itself.

        Nobody of higher priority does. When all have given way often enough, the youngest does: the
        oldest then gets to its end, and after it the next one.
        """
        priority = needy.targets.priority
        candidates = [r for r in running if _can_give_way(r) and r.targets.priority <= priority]
        fresh = [r for r in candidates if r.num_preemptions < self.max_preemptions]
        if fresh:
            return min(fresh, key=_spared)
        return min(candidates, key=_age, default=needy)

    def below(self, running: Iterable[Request], priority: int) -> list[Request]:
        """Those that may be made to give way for somebody of this priority, the first one first."""
        lower = [
            r
            for r in running
            if _can_give_way(r)
            and r.targets.priority < priority
            and r.num_preemptions < self.max_preemptions
        ]
        return sorted(lower, key=_spared)


def _can_give_way(request: Request) -> bool:
    """Prefill legs are announced to others block by block, and end soon by themselves."""
    return request.leg_token_limit is None


def _spared(request: Request) -> tuple[int, float, float]:
    """The least goes first. Without promises, whoever came last does (as in vLLM)."""
    return request.targets.priority, -next_due_s(request), -request.lifecycle.received_s


def _age(request: Request) -> tuple[int, float]:
    return request.targets.priority, -request.lifecycle.received_s
