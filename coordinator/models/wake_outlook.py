"""What a request for a model waits for that has no nodes now: a wake, and the prompts before it."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.admission import WaitingLine
from coordinator.admission.decisions import Awaited
from coordinator.nodes.registry import Member, Registry
from coordinator.pools.wakes import Coming
from coordinator.requests.running import RunningRequest
from pdserve.measured.perf_model import PerfModel
from pdserve.protocol import NodeRole, PerfReport, Prompt, Slo


class WakeOutlook:
    """The predictions for one model. Its last nodes tell how fast the next one will be."""

    def __init__(
        self,
        registry: Registry,
        can_route: Callable[[], bool],
        line: WaitingLine[RunningRequest],
        coming: Callable[[], Coming | None],
    ) -> None:
        """`coming`: when a node will be there; None: that is not known."""
        self._can_route = can_route
        self._line = line
        self._coming = coming
        self._perfs: dict[NodeRole, PerfReport] = {}
        registry.on_changed(self._changed)

    def of(self, slo: Slo, prompt: Prompt) -> Awaited | None:
        """Return what a request waits for; None: for no wake, or nobody knows."""
        coming = self._until_awake()
        if coming is None:
            return None
        before = self._line.not_below(slo.priority) if slo.ttft_s else ()
        return Awaited(
            wake_s=coming.in_s,
            is_ordered=coming.is_ordered,
            queue_s=sum(self._prompt_s(one.request.prompt) for one in before),
            prompt_s=self._prompt_s(prompt),
        )

    def wake_s(self) -> float:
        """Return the seconds until the model is awake; 0: it is, or nobody knows."""
        coming = self._until_awake()
        return 0.0 if coming is None else coming.in_s

    def _until_awake(self) -> Coming | None:
        return None if self._can_route() else self._coming()

    def _prompt_s(self, prompt: Prompt) -> float:
        """Return the time of it alone; 0 as long as the model has had no node."""
        perf = self._perfs.get(NodeRole.PREFILL) or self._perfs.get(NodeRole.DECODE)
        if perf is None:
            return 0.0
        return PerfModel(perf.step).prefill_s(prompt.num_tokens, 0, perf.token_budget)

    def _changed(self, member: Member) -> None:
        if member.is_ready and member.perf is not None:
            self._perfs[member.role] = member.perf
