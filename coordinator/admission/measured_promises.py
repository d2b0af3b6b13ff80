"""Promises that this cluster's nodes can keep: `--slo-classes auto`.

They are multiples of what the slowest ready node has measured: the time of a usual prompt alone,
and a decode step of a usual batch. The multiples leave room for a queue, and for chunks of prompts
beside streams. Promises change when a node joins, leaves or changes pools, not with the load; while
no node is left they stay. They are logged as `--slo-classes` takes them, so they can be pinned.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from msgspec.structs import replace

from coordinator.nodes.registry import Member, Registry
from pdserve.measured.perf_model import PerfModel
from pdserve.protocol import NodeRole, PerfReport
from pdserve.shared.slo import ServiceClasses, as_setting

PROMPT_TOKENS: Final = 1024
BATCH: Final = 16  # streams, each with a context of PROMPT_TOKENS
# Class |-> multiples of the two times for its TTFT and its TPOT.
MULTIPLES: Final = {"interactive": (5.0, 2.0), "standard": (25.0, 5.0)}

log = logging.getLogger(__name__)


class MeasuredPromises:
    """Keeps the promises of service classes at what the ready nodes have measured."""

    def __init__(self, registry: Registry, classes: ServiceClasses) -> None:
        """`classes` have the names in MULTIPLES; they are changed in place."""
        self._classes = classes
        self._ready: dict[Member, tuple[NodeRole, PerfReport]] = {}
        registry.on_changed(self._changed)
        registry.on_lost(self._lost)

    def _changed(self, member: Member) -> None:
        if not member.is_ready or member.perf is None:
            self._lost(member)
        elif self._ready.get(member) != (member.role, member.perf):
            self._ready[member] = member.role, member.perf
            self._promise()

    def _lost(self, member: Member) -> None:
        if self._ready.pop(member, None) is not None and self._ready:
            self._promise()

    def _promise(self) -> None:
        slow_prompt_s = max(map(prompt_s, self._perfs(NodeRole.PREFILL)))
        slow_step_s = max(map(step_s, self._perfs(NodeRole.DECODE)))
        by_name = self._classes.by_name
        promised = [
            replace(
                by_name[name],
                ttft_s=_rounded(ttft * slow_prompt_s),
                tpot_s=_rounded(tpot * slow_step_s),
            )
            for name, (ttft, tpot) in MULTIPLES.items()
        ]
        if promised != [by_name[name] for name in MULTIPLES]:
            self._classes.promise(promised)
            settings = ",".join(f'"{as_setting(cls)}"' for cls in by_name.values())
            log.info("the ready nodes can keep --slo-classes %s", settings)

    def _perfs(self, role: NodeRole) -> Iterable[PerfReport]:
        """Return the profiles of a pool, or of all nodes where one pool does everything."""
        pool = [perf for its_role, perf in self._ready.values() if its_role is role]
        return pool or [perf for _, perf in self._ready.values()]


def prompt_s(perf: PerfReport) -> float:
    """Return the time of a usual prompt alone, according to a profile."""
    return PerfModel(perf.step).prefill_s(PROMPT_TOKENS, 0, perf.token_budget)


def step_s(perf: PerfReport) -> float:
    """Return the time of a usual decode step, according to a profile."""
    num_streams = min(BATCH, perf.max_batch_size)
    return PerfModel(perf.step).decode_s(num_streams, num_streams * PROMPT_TOKENS)


def _rounded(seconds: float) -> float:
    """Round to two digits: a promise is no measurement, and equal nodes then promise the same."""
    return float(f"{seconds:.2g}")
