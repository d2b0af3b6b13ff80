"""The shared context of a comparison: the plan, the means to carry it out, and failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from pdserve.bench.compare.contest import Bout, Contender, Keep, Launch, Server
from pdserve.bench.compare.plan import ComparePlan
from pdserve.bench.compare.subject import Subject
from pdserve.bench.load.workload import TimedRequest
from pdserve.clock import Clock
from pdserve.errors import PdserveError


@dataclass(frozen=True, slots=True)
class Stage:
    """The context in which a comparison runs."""

    plan: ComparePlan
    launch: Launch
    clock: Clock
    keep: Keep
    tell: Callable[[str], None]  # reports progress to the user
    failures: dict[str, str]  # mode |-> why it is missing

    async def begin(self, server: Server, contender: Contender, subject: Subject) -> Bout:
        """Return a warmed-up contender. Raises ClusterError: it is gone."""
        bout = Bout(server, contender, subject.name, self.keep)
        await bout.warm_up(subject.workload.first(self.plan.warm_up))
        return bout

    def fail(self, who: str, error: PdserveError) -> None:
        """Record a failure; the mode is left out from here on."""
        self.failures[who] = error.message
        self.tell(f"{who} is left out: {error.message}")

    def requests_at(self, subject: Subject, rate: float) -> tuple[list[TimedRequest], float]:
        """Return the requests at that rate, and the seconds over which they arrive."""
        count = max(self.plan.least_requests, ceil(self.plan.duration_s * rate))
        requests = subject.workload.timed(rate, count)
        return requests, len(requests) / rate
