"""A load of streamed chats, and the CPU time of the process that it is sent to, while it is steady.

The measured window leaves out the beginning and the end of the load. The server counts the tokens
when a stream has ended; a stream's tokens are assumed to be evenly spaced from first to last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle
from typing import Any

import numpy as np

from pdserve.commands.bench.coordinator.chat_stream import ChatTarget
from pdserve.commands.bench.coordinator.config import Chats
from pdserve.commands.bench.cpu_time import cpu_seconds, starved_seconds
from pdserve.commands.bench.load.client import group_within
from pdserve.commands.bench.load.client_run import without_garbage_collection
from pdserve.commands.bench.load.open_loop import as_text
from pdserve.commands.bench.load.outcome import Outcome
from pdserve.commands.bench.load.workload import random_ids

_RAMP = 0.2  # share of a load's duration before the window
_NUM_PROMPTS = 256  # different prompts


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    """A measured server."""

    name: str
    target: ChatTarget
    pid: int = 0  # 0: not known
    upstream_pid: int = 0  # process that generates the tokens, if it is another one


@dataclass(frozen=True, slots=True)
class Look:
    """CPU times of a load's processes so far; zeros for unknown processes."""

    at_s: float
    cpu_s: float = 0.0  # of the measured server
    starved_s: float = 0.0  # likewise
    beside_s: float = 0.0  # CPU time of the client and of the server behind it


@dataclass(frozen=True, slots=True)
class LoadRound:
    """The result of one load. Times in seconds since its start."""

    outcomes: list[Outcome]
    begin: Look
    end: Look

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return self.end.at_s - self.begin.at_s

    @property
    def cpu_s(self) -> float:
        """CPU seconds of it in the window; 0 if its process is not known."""
        return self.end.cpu_s - self.begin.cpu_s

    @property
    def starved_s(self) -> float:
        """How long the process was runnable without a core."""
        return self.end.starved_s - self.begin.starved_s

    @property
    def beside_s(self) -> float:
        """CPU seconds of the client and of the server behind it in the window."""
        return self.end.beside_s - self.begin.beside_s

    @property
    def num_requests(self) -> float:
        """Requests answered in the window; part of an answer counts as that part of a request."""
        tokens = [(self._tokens_of(outcome), outcome.num_output) for outcome in self._answered]
        return sum(received / wanted for received, wanted in tokens)

    @property
    def num_tokens(self) -> float:
        """Tokens that arrived in the window."""
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


class ChatLoad:
    """A load with the same requests for every server."""

    def __init__(self, chats: Chats, duration_s: float, drain_s: float, seed: int) -> None:
        """Prepare a load; `drain_s` after it, requests that still run are cancelled."""
        self._chats = chats
        self._duration_s = duration_s
        self._drain_s = drain_s
        self._seed = seed

    async def run(self, server: MeasuredServer) -> LoadRound:
        """Run one round on this server.

        Raises:
            ClusterError: it cannot be reached, or does not end its answers in time.
        """
        requests = self._requests(server.target)
        begin = self._closed if self._chats.load.concurrency else self._open
        outcomes: list[Outcome] = []
        with without_garbage_collection():
            start_s = time.perf_counter()
            sending = begin(server.target, cycle(requests), outcomes, start_s)
            looks = await self._looked_at(server, start_s, sending)
        return LoadRound(outcomes, *looks)

    def _closed(
        self, target: ChatTarget, requests: Iterator[bytes], outcomes: list[Outcome], start_s: float
    ) -> list[Coroutine[Any, Any, None]]:
        """Make the streams of a closed loop; each sends its next request after an answer."""

        async def one_after_another() -> None:
            while (due_s := time.perf_counter() - start_s) < self._duration_s:
                outcome = self._outcome(due_s)
                outcomes.append(outcome)
                await target.send(next(requests), outcome, start_s)

        return [one_after_another() for _ in range(self._chats.load.concurrency)]

    def _open(
        self, target: ChatTarget, requests: Iterator[bytes], outcomes: list[Outcome], start_s: float
    ) -> list[Coroutine[Any, Any, None]]:
        """Make the requests of an open loop, at random times whatever happens to earlier ones."""
        rate, rng = self._chats.load.rate, np.random.default_rng([self._seed, 1])
        gaps_s = rng.exponential(1 / rate, max(1, int(rate * self._duration_s)))

        async def when_due(request: bytes, outcome: Outcome) -> None:
            await asyncio.sleep(start_s + outcome.due_s - time.perf_counter())
            outcome.due_s = min(outcome.due_s, time.perf_counter() - start_s)  # timers are coarse
            await target.send(request, outcome, start_s)

        outcomes += map(self._outcome, accumulate(gaps_s.tolist()))
        return [when_due(*pair) for pair in zip(requests, outcomes, strict=False)]

    def _requests(self, target: ChatTarget) -> list[bytes]:
        """Encode all requests before the load, since this takes time."""
        chats = self._chats
        return [
            target.request(
                as_text(random_ids(chats.prompt_words, [self._seed, number])), chats.output_tokens
            )
            for number in range(_NUM_PROMPTS)
        ]

    def _outcome(self, due_s: float) -> Outcome:
        return Outcome(
            kind="chat",
            due_s=due_s,
            num_prompt=self._chats.prompt_words,
            num_output=self._chats.output_tokens,
            arrivals_s=[],
        )

    async def _looked_at(
        self, server: MeasuredServer, start_s: float, sending: Sequence[Coroutine[Any, Any, None]]
    ) -> tuple[Look, Look]:
        """Send the load, and read CPU times at the beginning and end of the window."""

        async def look_at(at_s: float) -> Look:
            await asyncio.sleep(start_s + at_s - time.perf_counter())
            return _look(server, time.perf_counter() - start_s)

        late = f"{server.name} did not end its answers within {self._drain_s:g} s of a load's end"
        async with group_within(self._duration_s + self._drain_s, late) as tasks:
            begin = tasks.create_task(look_at(_RAMP * self._duration_s))
            end = tasks.create_task(look_at(self._duration_s))
            for one in sending:
                tasks.create_task(one)
        return begin.result(), end.result()


def _look(server: MeasuredServer, now_s: float) -> Look:
    pid, upstream_pid = server.pid, server.upstream_pid
    return Look(
        now_s,
        cpu_s=cpu_seconds(pid) if pid else 0.0,
        starved_s=starved_seconds(pid) if pid else 0.0,
        beside_s=time.process_time() + (cpu_seconds(upstream_pid) if upstream_pid else 0.0),
    )
