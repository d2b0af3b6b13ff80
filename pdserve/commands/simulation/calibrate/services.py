"""CPU time of what is beside the engines: coordinator, client, and what nodes do for requests.

They take it from steps where no core is idle, and each of them can be what limits a cluster.

It is looked at twice a second. Windows in which many streams go on, and others in which prompts
come, tell apart what a request, a step and a token cost; whole phases are too much alike.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from bisect import bisect_left
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal, NamedTuple, TypeVar

import numpy as np

from pdserve.commands.bench.cpu_time import thread_seconds
from pdserve.commands.cluster.plan import COORDINATOR
from pdserve.commands.simulation.calibrate.drive import Driver, Sent
from pdserve.commands.simulation.calibrate.samples import NodeReader, Recording
from pdserve.measured.calibration import Services, ServiceTimes
from pdserve.node.profiling.fit import non_negative_least_squares
from pdserve.shared.process.thread_name import ENGINE_THREAD, KERNEL_THREAD

T = TypeVar("T")

Process = Literal["coordinator", "client", "prefill", "decode"]
_NODES: Final[dict[Process, str]] = {"prefill": "prefill-0", "decode": "decode-0"}
_ENGINE: Final = (ENGINE_THREAD, KERNEL_THREAD)
_CLIENT: Final = "client"
_WINDOW_S: Final = 0.5
_LEAST: Final = 5  # windows, of four unknowns and some rest


@dataclass(frozen=True, slots=True)
class Done:
    """What passed through a process in a window of time."""

    cpu_s: float  # beside the engine
    seconds: float
    num_requests: int
    num_prompt_tokens: int
    num_steps: int  # its own, or those of nodes that told it tokens
    num_tokens: float  # in these steps
    steps_s: float = 0.0  # of a node: its steps, each since the one before or since it was idle
    engine_s: float = 0.0  # of a node: CPU time of the thread that computes them
    is_alone: bool = False  # one request at a time


Work = Mapping[Process, Done]
"""What was done in a window."""


class Looked(NamedTuple):
    """What processes had used by a moment."""

    at_s: float
    cpu_s: Mapping[str, tuple[float, float]]  # process |-> beside its engine, and in its thread


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

    async def rest(self, seconds: float) -> None:
        """Measure what processes take while there is nothing to do: heartbeats and reports.

        During a third of the time, they may still be busy with what was before.
        """
        await asyncio.sleep(seconds / 3)
        await self.during(asyncio.sleep(seconds * 2 / 3))

    async def during(self, phase: Awaitable[T], *, is_alone: bool = False) -> tuple[T, Recording]:
        """Measure a phase; return its result, and what nodes have measured meanwhile.

        `is_alone`: it sends one request at a time.
        """
        looks, first = [self._look()], len(self._driver.sent)
        looking = asyncio.create_task(self._keep_looking(looks))
        try:
            result = await phase
        finally:
            looking.cancel()
            await asyncio.wait([looking])
        looks.append(self._look())
        read = await self._reader.read()
        if self._pids:
            sent = self._driver.sent[first:]
            self._found += windows_of(looks, sent, read, is_alone=is_alone)
        return result, read

    async def _keep_looking(self, looks: list[Looked]) -> None:
        while True:
            await asyncio.sleep(_WINDOW_S)
            looks.append(self._look())

    def _look(self) -> Looked:
        found = {}
        for name, pid in self._pids.items():
            threads = thread_seconds(pid)
            engine_s = sum(threads.get(thread, 0.0) for thread in _ENGINE)
            found[name] = sum(threads.values()) - engine_s, threads.get(ENGINE_THREAD, 0.0)
        return Looked(time.perf_counter(), found)


def windows_of(
    looks: Sequence[Looked], sent: Sequence[Sent], read: Recording, *, is_alone: bool
) -> list[Work]:
    """Return what each process did between two looks. Steps and requests have the same clock.

    A request is work for coordinator and client when it is sent, and for nodes at its token 1.
    """
    edges_s = [look.at_s for look in looks]

    def each(at_s: Sequence[float], amounts: Sequence[float] | None = None) -> list[float]:
        sums = [0.0] * (len(edges_s) + 1)
        for n, when_s in enumerate(at_s):
            sums[bisect_left(edges_s, when_s)] += 1.0 if amounts is None else amounts[n]
        return sums[1:-1]

    def done(process: Process, name: str) -> list[Done]:
        # The steps of a node, or all that the others are told of.
        is_node = process in _NODES
        nodes = [name] if is_node else list(read.steps)
        steps = [(step, node) for node in nodes for step in read.steps.get(node, ())]
        right = {node: read.right_share(node) for node in nodes}
        ended_s = [step.ended_s for step, _ in steps]
        came = [one for one in sent if not is_node or one.first_s is not None]
        came_s = [one.first_s if is_node and one.first_s is not None else one.at_s for one in came]
        columns = zip(
            each(came_s),
            each(came_s, [one.num_prompt for one in came]),
            each(ended_s, [float(step.sampled > 0) for step, _ in steps]),
            each(ended_s, [step.sampled * right[node] for step, node in steps]),
            each(ended_s, [step.period_s for step, _ in steps]),
            strict=True,
        )
        return [
            Done(
                after.cpu_s[name][0] - before.cpu_s[name][0],
                after.at_s - before.at_s,
                round(requests),
                round(prompt_tokens),
                round(num_steps),
                num_tokens,
                steps_s,
                after.cpu_s[name][1] - before.cpu_s[name][1],
                is_alone,
            )
            for (before, after), (requests, prompt_tokens, num_steps, num_tokens, steps_s) in zip(
                pairwise(looks), columns, strict=True
            )
        ]

    by_process = {process: done(process, name) for process, name in _processes(looks[0].cpu_s)}
    return [
        {process: windows[n] for process, windows in by_process.items()}
        for n in range(len(looks) - 1)
    ]


def _processes(names: Mapping[str, object]) -> list[tuple[Process, str]]:
    """Return what is measured. Where nodes do both, nobody knows whose the requests were."""
    found: dict[Process, str] = {"coordinator": COORDINATOR, "client": _CLIENT}
    if _NODES["prefill"] in names:
        found |= _NODES
    return [(process, name) for process, name in found.items() if name in names]


class Beside(NamedTuple):
    """What is beside the steps of engines."""

    services: Services
    node_threads: float  # as `Sharing.node_threads`


def beside_of(works: Sequence[Work]) -> Beside:
    """Divide the CPU time of each process by what it did; nothing of those that few measured.

    What a decode node does for steps is in their times. So is what a prefill node does for a prompt
    during its step: this takes longer than its thread computes. The rest of it is the prompt's.
    """

    def done(process: Process) -> list[Done]:
        return [work[process] for work in works if process in work]

    prefills, decodes = done("prefill"), done("decode")
    prefill, decode = _times(prefills, is_per_step=False), _times(decodes)
    alone = [one for one in prefills if one.is_alone]
    all_s = sum(prefill.of(one) for one in alone)
    hidden_s = sum(one.steps_s - one.engine_s for one in alone)
    share = min(1.0, max(0.0, 1 - hidden_s / all_s)) if all_s else 1.0
    services = Services(
        coordinator=_times(done("coordinator")).times,
        client=_times(done("client")).times,
        prefill=ServiceTimes(share * prefill.times.request_s, share * prefill.times.prompt_token_s),
        decode=ServiceTimes(decode.times.request_s, decode.times.prompt_token_s),
    )
    return Beside(services, _node_threads(decodes, decode.times))


class _Times(NamedTuple):
    times: ServiceTimes

    def of(self, done: Done) -> float:
        """Return the CPU seconds that this took, without those of an idle process."""
        times = self.times
        return (
            times.request_s * done.num_requests
            + times.prompt_token_s * done.num_prompt_tokens
            + times.step_s * done.num_steps
            + times.token_s * done.num_tokens
        )


def _times(done: Sequence[Done], *, is_per_step: bool = True) -> _Times:
    """Fit what is beyond the time that a process takes while there is nothing to do.

    That is measured in windows of rest. As one more unknown it would have most of the work: a node
    has about as many steps in each window that has any.
    """
    if len(done) < _LEAST:
        return _Times(ServiceTimes())
    rows = np.array(
        [[d.num_requests, d.num_prompt_tokens, d.num_steps, d.num_tokens] for d in done], float
    )
    if not is_per_step:
        rows[:, 2:] = 0.0
    rest = [d.cpu_s / d.seconds for d in done if not d.num_requests and not d.num_steps]
    idle = statistics.median(rest) if rest else 0.0
    worked_s = np.array([max(0.0, d.cpu_s - idle * d.seconds) for d in done])
    return _Times(ServiceTimes(*non_negative_least_squares(rows, worked_s).tolist()))


def _node_threads(done: Sequence[Done], times: ServiceTimes) -> float:
    """Return how many threads want a node's core while it decodes, on average.

    What its event loop does for steps while the engine computes takes twice as long on one core,
    and both want it for so long. What it does for requests is simulated.
    """
    steps_s = sum(times.step_s * d.num_steps + times.token_s * d.num_tokens for d in done)
    engine_s = sum(d.engine_s for d in done)
    return 1 + 2 * min(steps_s, engine_s) / (steps_s + engine_s) if steps_s else 1.0
