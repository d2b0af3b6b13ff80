"""Which of a node's cores compute, and which run everything else.

The engine's thread and its kernel workers are pinned to the compute cores. If the node has more
cores than compute threads, the event loop, gRPC and copies of KV are kept on the other ones. No
torch here, because `pdserve up` imports this.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from pdserve.settings.config import EngineConfig
from pdserve.settings.values import format_cpus, parse_cpus
from pdserve.shared.errors import ConfigError

_MANY_CORES = 8  # from here on, reserving a core for services costs less than sharing one


@dataclass(frozen=True, slots=True)
class CorePlan:
    """How a node uses its cores."""

    num_threads: int  # compute threads
    compute: tuple[int, ...]  # core numbers
    service: tuple[int, ...]  # equal to `compute` if there are none to spare

    @property
    def has_spare_cores(self) -> bool:
        """Whether services have cores on which nothing computes."""
        return self.service != self.compute

    def of_rank(self, rank: int, num_ranks: int) -> CorePlan:
        """What one rank has of it: a share of the threads, and of the cores.

        With more ranks than threads, each has one; with more than cores, they take turns.
        """
        if num_ranks == 1:
            return self
        threads, cores = (
            (rank * total // num_ranks, (rank + 1) * total // num_ranks)
            for total in (max(self.num_threads, num_ranks), len(self.compute))
        )
        own = self.compute[slice(*cores)] or (self.compute[rank % len(self.compute)],)
        return replace(self, num_threads=threads[1] - threads[0], compute=own)

    def describe(self) -> str:
        """One line for logs, including a shortage of cores."""
        text = f"{self.num_threads} compute threads on cores {format_cpus(self.compute)}"
        if self.has_spare_cores:
            text += f", services on {format_cpus(self.service)}"
        else:
            text += ", which the node's services share"
        if self.num_threads > len(self.compute):
            text += f"; they take turns: {self.num_threads} threads, {len(self.compute)} cores"
        return text


def plan_cores(engine: EngineConfig, usable: Sequence[int]) -> CorePlan:
    """Divide the cores that the config names, or else all usable ones.

    Raises:
        ConfigError: the config names a core that is not usable.
    """
    cores = sorted(set(parse_cpus(engine.cpus))) or sorted(usable)
    if not set(cores) <= set(usable):
        raise ConfigError(
            f"cpus {engine.cpus!r}: this process may use {format_cpus(sorted(usable))}"
        )
    num_threads = engine.threads or (len(cores) - (len(cores) >= _MANY_CORES))
    compute = tuple(cores[:num_threads])
    return CorePlan(num_threads, compute, tuple(cores[num_threads:]) or compute)


def use_service_cores(plan: CorePlan) -> None:
    """Pin all present threads, and the threads that they start, to the service cores.

    Call this before anything computes, and before the event loop runs.
    """
    for thread in os.listdir("/proc/self/task"):  # libraries have started some already
        with suppress(ProcessLookupError):  # the thread has just ended
            os.sched_setaffinity(int(thread), plan.service)


def use_compute_cores(plan: CorePlan) -> None:
    """Pin the calling thread, and the workers that it starts, to the compute cores."""
    os.sched_setaffinity(0, plan.compute)


def processor_name(cpuinfo: str) -> str:
    """The model name in the text of /proc/cpuinfo."""
    match = re.search(r"^(?:model name|Processor|CPU part)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return match[1].strip() if match else "unknown"
