"""CPU time of what is beside the engines: coordinator, client, and what nodes do for requests.

They take it from steps where no core is idle, and each of them can be what limits a cluster.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, Literal, TypeVar

import numpy as np

from pdserve.commands.bench.cpu_time import thread_seconds
from pdserve.commands.cluster.plan import COORDINATOR
from pdserve.commands.simulation.calibrate.drive import Driver
from pdserve.commands.simulation.calibrate.samples import NodeReader, Recording
from pdserve.measured.calibration import Services, ServiceTimes
from pdserve.node.profiling.fit import non_negative_least_squares
from pdserve.shared.process.thread_name import ENGINE_THREAD, KERNEL_THREAD

T = TypeVar("T")

Process = Literal["coordinator", "client", "prefill", "decode"]
_NODES: Final[dict[Process, str]] = {"prefill": "prefill-0", "decode": "decode-0"}
_ENGINE: Final = (ENGINE_THREAD, KERNEL_THREAD)
_CLIENT: Final = "client"
_LEAST = 4  # phases, of as many unknowns


@dataclass(frozen=True, slots=True)
class Done:
    """What passed through a process in a phase of a measurement."""

    cpu_s: float  # beside the engine
    num_requests: int
    num_prompt_tokens: int
    num_steps: int  # its own, or those of nodes that told it tokens
    num_tokens: int  # in these steps
    engine_s: float = 0.0  # of a node: CPU time of its steps


Work = Mapping[Process, Done]
"""What was done in a phase."""


class ServiceMeter:
    """Measures phases. The client is this process."""

    def __init__(
        self, driver: Driver, reader: NodeReader, pids: Mapping[str, int], found: list[Work]
    ) -> None:
        """Add to `found`; nothing, if the processes of the cluster, by name, are not known."""
        self._driver = driver
        self._reader = reader
        self._pids = {**pids, _CLIENT: os.getpid()} if pids else {}
        self._found = found
        self._idle: dict[str, float] = {}  # process |-> share of a core

    async def rest(self, seconds: float) -> None:
        """Measure what processes take while there is nothing to do: heartbeats and reports.

        During a third of the time, they may still be busy with what was before.
        """
        await asyncio.sleep(seconds / 3)
        before_s, began_s = self._cpu_s(), time.monotonic()
        await asyncio.sleep(seconds * 2 / 3)
        passed_s = time.monotonic() - began_s
        self._idle = {
            name: (after_s - before_s[name][0]) / passed_s
            for name, (after_s, _) in self._cpu_s().items()
        }

    async def during(self, phase: Awaitable[T]) -> tuple[T, Recording]:
        """Measure a phase; return its result, and what nodes have measured meanwhile."""
        driver, before_s, began_s = self._driver, self._cpu_s(), time.monotonic()
        num_requests, num_prompt_tokens = driver.num_requests, driver.num_prompt_tokens
        result = await phase
        after_s, passed_s = self._cpu_s(), time.monotonic() - began_s
        read = await self._reader.read()
        requests = driver.num_requests - num_requests
        prompt_tokens = driver.num_prompt_tokens - num_prompt_tokens
        work: dict[Process, Done] = {}
        for process, name in self._processes():
            # The steps of a node, or all that the others are told of.
            nodes = [name] if process in _NODES else list(read.steps)
            steps = chain.from_iterable(read.steps.get(node, ()) for node in nodes)
            service_s, engine_s = (
                after - before for before, after in zip(before_s[name], after_s[name], strict=True)
            )
            work[process] = Done(
                max(0.0, service_s - self._idle.get(name, 0.0) * passed_s),
                requests,
                prompt_tokens,
                sum(step.sampled > 0 for step in steps),
                sum(map(read.num_tokens, nodes)),
                engine_s,
            )
        if work:
            self._found.append(work)
        return result, read

    def _cpu_s(self) -> dict[str, tuple[float, float]]:
        """Return the CPU time of each process beside its engine, and of this."""
        found = {}
        for name, pid in self._pids.items():
            threads = thread_seconds(pid)
            engine_s = sum(threads.get(thread, 0.0) for thread in _ENGINE)
            found[name] = sum(threads.values()) - engine_s, engine_s
        return found

    def _processes(self) -> list[tuple[Process, str]]:
        """Return what is measured. Where nodes do both, nobody knows whose the requests were."""
        names: dict[Process, str] = {"coordinator": COORDINATOR, "client": _CLIENT}
        if _NODES["prefill"] in self._pids:
            names |= _NODES
        return [(process, name) for process, name in names.items() if name in self._pids]


def services_of(works: Sequence[Work], hidden_s: float = 0.0) -> Services:
    """Divide the CPU time of each process by what it did; nothing of those that few measured.

    What a decode node does for steps is in their times. So is what a prefill node does for a
    handoff during a step, `hidden_s` on average; the rest is the prompt's.
    """

    def done(process: Process) -> list[Done]:
        return [work[process] for work in works if process in work]

    decode, prefills = _times(done("decode")), done("prefill")
    all_s = sum(one.cpu_s for one in prefills)
    seen_s = max(0.0, all_s - hidden_s * sum(one.num_steps for one in prefills))
    prefill = _times([replace(one, num_steps=0, num_tokens=0) for one in prefills])
    share = seen_s / all_s if all_s else 0.0
    return Services(
        coordinator=_times(done("coordinator")),
        client=_times(done("client")),
        prefill=ServiceTimes(share * prefill.request_s, share * prefill.prompt_token_s),
        decode=ServiceTimes(decode.request_s, decode.prompt_token_s),
    )


def _times(done: Sequence[Done]) -> ServiceTimes:
    known = [one for one in done if one.cpu_s > 0]
    if len(known) < _LEAST:
        return ServiceTimes()
    # Relative to the time: short phases say as much as long ones.
    rows = np.array(
        [[d.num_requests, d.num_prompt_tokens, d.num_steps, d.num_tokens] for d in known]
    ) / np.array([[d.cpu_s] for d in known])
    request_s, prompt_token_s, step_s, token_s = non_negative_least_squares(
        rows, np.ones(len(known))
    ).tolist()
    return ServiceTimes(request_s, prompt_token_s, step_s, token_s)


def node_threads(works: Sequence[Work], services: Services) -> float:
    """Return how many threads want a node's core while it decodes, on average.

    What its event loop does for steps while the engine computes takes twice as long on one core,
    and both want it for so long. What it does for requests is simulated.
    """
    done, of = [work["decode"] for work in works if "decode" in work], services.decode
    steps_s = engine_s = 0.0
    for d in done:
        requests_s = of.request_s * d.num_requests + of.prompt_token_s * d.num_prompt_tokens
        steps_s += max(0.0, d.cpu_s - requests_s)
        engine_s += d.engine_s
    return 1 + 2 * min(steps_s, engine_s) / (steps_s + engine_s) if steps_s else 1.0
