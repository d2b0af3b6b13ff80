"""CPU time of what is in front of the nodes: the coordinator, and the clients on its host.

On a host whose cores all compute steps, they take it from these.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from pdserve.commands.bench.cpu_time import cpu_seconds
from pdserve.commands.simulation.calibrate.drive import Driver
from pdserve.commands.simulation.calibrate.samples import NodeReader, Recording

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FrontWork:
    """What the front did during a phase of a measurement."""

    cpu_s: float
    num_requests: int
    num_steps: int  # of nodes, whose tokens it was told
    num_tokens: int


class FrontMeter:
    """Measures phases. The clients are those of this process."""

    def __init__(
        self,
        driver: Driver,
        reader: NodeReader,
        coordinator_pid: int | None,
        found: list[FrontWork],
    ) -> None:
        """Add to `found`; nothing, if the coordinator is not known, as it may be elsewhere."""
        self._driver = driver
        self._reader = reader
        self._pid = coordinator_pid
        self._found = found

    async def during(self, phase: Awaitable[T], recording: Recording) -> T:
        """Add what nodes measure during a phase to `recording`; return the phase's result."""
        driver = self._driver
        cpu_s, num_requests, num_tokens = self._cpu_s(), driver.num_requests, driver.num_tokens
        result = await phase
        cpu_s = self._cpu_s() - cpu_s
        read = await self._reader.read()
        recording.extend(read)
        if self._pid is not None:
            work = FrontWork(
                cpu_s=cpu_s,
                num_requests=driver.num_requests - num_requests,
                num_steps=sum(step.sampled > 0 for steps in read.steps.values() for step in steps),
                num_tokens=driver.num_tokens - num_tokens,
            )
            self._found.append(work)
        return result

    def _cpu_s(self) -> float:
        return cpu_seconds(self._pid) + time.process_time() if self._pid is not None else 0.0
