"""Which cores of a node compute, and which do everything else.

The engine's thread and the workers that share its kernels stay on the compute cores. The event
loop, gRPC and copies of KV stay off them where the node has more cores than compute threads. No
torch here: `pdserve up` asks, too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from pdserve.config import EngineConfig
from pdserve.config_values import format_cpus, parse_cpus
from pdserve.errors import ConfigError

# From so many cores on, one less for computing costs less than what it keeps out of its way.
_MANY_CORES = 8


@dataclass(frozen=True, slots=True)
class CorePlan:
    """A node's share of the machine."""

    num_threads: int  # that compute
    compute: tuple[int, ...]
    service: tuple[int, ...]  # the same ones when there are none to spare

    def describe(self) -> str:
        """One line for logs; with what is not possible."""
        text = f"{self.num_threads} compute threads on cores {format_cpus(self.compute)}"
        if self.service == self.compute:
            text += ", which the node's services share"
        else:
            text += f", services on {format_cpus(self.service)}"
        if self.num_threads > len(self.compute):
            text += f"; they take turns: {self.num_threads} threads, {len(self.compute)} cores"
        return text


def plan_cores(engine: EngineConfig, usable: Sequence[int]) -> CorePlan:
    """Deal out the cores that the config names, or else all that are usable.

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
    """Have every thread that there is, and those that they start, stay on the service cores.

    To be called before anything computes, and before the event loop runs.
    """
    for thread in os.listdir("/proc/self/task"):  # libraries have started some already
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), plan.service)


def use_compute_cores(plan: CorePlan) -> None:
    """Have the calling thread, and the workers that it starts, stay on the compute cores."""
    os.sched_setaffinity(0, plan.compute)
