"""A load of streamed chats on a gateway, and what its process computed while the load was steady.

The window that counts leaves out how the load begins and how it ends. Tokens are counted by the
server, when a stream has ended; those of a stream are taken to come evenly from its first to its
last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle
from typing import Any

import numpy as np

from pdserve.bench.chat_stream import ChatTarget
from pdserve.bench.cpu_time import cpu_seconds, starved_seconds
from pdserve.bench.gateway_plan import Chats
from pdserve.bench.open_loop import as_text
from pdserve.bench.slo_score import Outcome
from pdserve.bench.workload import random_ids
from pdserve.errors import ClusterError

_RAMP = 0.2  # of a load's duration, before the window


@dataclass(frozen=True, slots=True)
class Gateway:
    """A server that is measured."""

    name: str
    target: ChatTarget
    pid: int  # 0: not known


@dataclass(frozen=True, slots=True)
class Look:
    """At a gateway's process, so far; zeros where it is not known."""

    at_s: float
    cpu_s: float = 0.0
    starved_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadRound:
    """What one load came to. Times in seconds since its start."""

    outcomes: list[Outcome]
    begin: Look
    end: Look

    @property
    def seconds(self) -> float:
        """Of the window."""
        return self.end.at_s - self.begin.at_s

    @property
    def cpu_s(self) -> float:
        """Of a core, in the window; 0 where the process is not known."""
        return self.end.cpu_s - self.begin.cpu_s

    @property
    def starved_s(self) -> float:
        """How long the process could have run and had no core."""
        return self.end.starved_s - self.begin.starved_s

    @property
    def num_requests(self) -> float:
        """That were answered in the window; a part of an answer is that part of a request."""
        tokens = [(self._tokens_of(outcome), outcome.num_output) for outcome in self._answered]
        return sum(received / wanted for received, wanted in tokens)

    @property
    def num_tokens(self) -> float:
        """That came in the window."""
        return sum(self._tokens_of(outcome) for outcome in self._answered)

    @property
    def _answered(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.arrivals_s]

    def _tokens_of(self, outcome: Outcome) -> float:
        first_s, last_s = outcome.arrivals_s[0], outcome.arrivals_s[-1]
        if first_s == last_s:
            return outcome.num_received * (self.begin.at_s <= first_s < self.end.at_s)
        inside_s = min(last_s, self.end.at_s) - max(first_s, self.begin.at_s)
        return outcome.num_received * max(inside_s, 0.0) / (last_s - first_s)


class GatewayLoad:
    """The same requests for every gateway."""

    def __init__(self, chats: Chats, duration_s: float, drain_s: float, seed: int) -> None:
        """`drain_s`: for what still runs when the load is over; then it is hung up on."""
        self._chats = chats
        self._duration_s = duration_s
        self._drain_s = drain_s
        self._seed = seed

    async def closed(self, gateway: Gateway, streams: int) -> LoadRound:
        """So many streams, each of which asks again when it was answered.

        Raises:
            ClusterError: the gateway cannot be reached.
        """
        requests = iter(cycle(self._requests(gateway, streams)))
        outcomes: list[Outcome] = []
        start_s = time.perf_counter()

        async def one_after_another() -> None:
            while (due_s := time.perf_counter() - start_s) < self._duration_s:
                outcome = self._outcome(due_s)
                outcomes.append(outcome)
                await gateway.target.send(next(requests), outcome, start_s)

        return await self._run(
            gateway, start_s, outcomes, [one_after_another() for _ in range(streams)]
        )

    async def open(self, gateway: Gateway, rate: float) -> LoadRound:
        """So many requests a second, at random times, whatever became of those before them.

        Raises:
            ClusterError: the gateway cannot be reached.
        """
        rng = np.random.default_rng([self._seed, 1])
        count = max(1, int(rate * self._duration_s))
        times = list(accumulate(rng.exponential(1 / rate, count).tolist()))
        requests = cycle(self._requests(gateway, min(count, 256)))
        outcomes = [self._outcome(due_s) for due_s in times]
        start_s = time.perf_counter()

        async def when_due(request: bytes, outcome: Outcome) -> None:
            await asyncio.sleep(start_s + outcome.due_s - time.perf_counter())
            outcome.due_s = min(outcome.due_s, time.perf_counter() - start_s)  # timers are coarse
            await gateway.target.send(request, outcome, start_s)

        sending = [when_due(*pair) for pair in zip(requests, outcomes, strict=False)]
        return await self._run(gateway, start_s, outcomes, sending)

    def _requests(self, gateway: Gateway, count: int) -> list[bytes]:
        """Made before the load: it takes time."""
        chats = self._chats
        return [
            gateway.target.request(
                as_text(random_ids(chats.prompt_words, [self._seed, number])), chats.output_tokens
            )
            for number in range(count)
        ]

    def _outcome(self, due_s: float) -> Outcome:
        return Outcome(
            kind=self._chats.name,
            due_s=due_s,
            num_prompt=self._chats.prompt_words,
            num_output=self._chats.output_tokens,
            arrivals_s=[],
        )

    async def _run(
        self,
        gateway: Gateway,
        start_s: float,
        outcomes: list[Outcome],
        sending: Sequence[Coroutine[Any, Any, None]],
    ) -> LoadRound:
        async def look_at(at_s: float) -> Look:
            await asyncio.sleep(start_s + at_s - time.perf_counter())
            pid, now_s = gateway.pid, time.perf_counter() - start_s
            return Look(now_s, cpu_seconds(pid), starved_seconds(pid)) if pid else Look(now_s)

        failure: ClusterError | None = None
        try:
            async with (
                asyncio.timeout(self._duration_s + self._drain_s),
                asyncio.TaskGroup() as tasks,
            ):
                begin = tasks.create_task(look_at(_RAMP * self._duration_s))
                end = tasks.create_task(look_at(self._duration_s))
                for one in sending:
                    tasks.create_task(one)
        except* TimeoutError:
            failure = ClusterError(
                f"{gateway.name} did not end its answers within {self._drain_s:g} s of a load's end"
            )
        except* ClusterError as errors:
            failure = ClusterError(str(errors.exceptions[0]))
        if failure is not None:
            raise failure
        return LoadRound(outcomes, begin.result(), end.result())
