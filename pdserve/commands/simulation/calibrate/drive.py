"""What clients send to a cluster so that its nodes meet all kinds of steps.

    prompts    one at a time, each a few tokens longer answered: prefill, pulls, idle latencies
    growing    one prompt that grows as far as time allows: what keys of long contexts cost
    streams    many at once, in batches of all sizes between which costs are interpolated, with
               short and long contexts: decode
    answers    short prompts one by one beside the answers of others, as users send them: services
    both       prompts beside streams: mixed steps, or what the nodes of a host cost each other

KV in decodes is that of real prompts. No prompt shares a prefix with any other, but for those that
extend the one before them: so a context takes no longer than to compute it once.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from pdserve.commands.bench.load.client import PLAIN_IDS
from pdserve.commands.bench.load.open_loop import OpenLoopClient
from pdserve.commands.bench.load.outcome import Outcome
from pdserve.commands.bench.load.workload import TimedRequest
from pdserve.kv import need
from pdserve.measured.calibration import NodeLimits
from pdserve.node.profiling.fit import token_ladder

ANSWER = 6  # tokens after a measured prompt
_STREAM = 48  # tokens of a measured stream
_AT_LENGTH = 16  # tokens, after each length of a prompt that grows
_LEAST_GROWING = 256
_FILLED = 8  # streams, which take as long to begin as a batch of them is measured
_ANSWERED, _SHORT = 16, 48  # streams at once, tokens of a prompt
_ANSWERS = 8, 96  # tokens: the least and the most
_MOST_ANSWERS = 800
_ROOM = 0.7  # share of a node's KV that streams may fill
_DEADLINE_S = 120.0  # of one request
_EXTENDED = 0.3  # share of the prompts that extend the one before
_GROWTH = 1.6  # between two lengths of prompts


@dataclass(frozen=True, slots=True)
class Idle:
    """One request to an idle cluster."""

    num_prompt: int
    ttft_s: float
    first_gap_s: float  # between tokens 1 and 2
    later_gap_s: float  # the median of the others

    @classmethod
    def of(cls, outcome: Outcome) -> Idle:
        """As its client saw it."""
        gaps = [later - earlier for earlier, later in pairwise(outcome.arrivals_s)]
        later = sorted(gaps[1:]) or [0.0]
        return cls(outcome.num_prompt, outcome.ttft_s, gaps[0], later[len(later) // 2])


class Sent(NamedTuple):
    """A request that was sent; times are those of `time.perf_counter`."""

    at_s: float
    first_s: float | None  # its token 1; None: it had none
    num_prompt: int


class Driver:
    """Sends requests of all sizes that the nodes take, until a phase's time is over."""

    def __init__(
        self, client: OpenLoopClient, limits: NodeLimits, block_size: int, seed: int
    ) -> None:
        self._client = client
        self._limits = limits
        self._tokens = need.tokens_in(limits.num_blocks, block_size)
        self._random = random.Random(seed)
        self._num_phases = 0
        self.prompt_lengths: set[int] = set()  # of all requests that were served
        self.contexts: set[int] = set()
        self.sent: list[Sent] = []

    @property
    def longest(self) -> int:
        """Most tokens of a prompt that is sent."""
        return min(self._limits.max_model_len, int(_ROOM * self._tokens)) - _STREAM

    async def prompts(self, seconds: float) -> list[Idle]:
        """Send prompts one at a time, from short ones to the longest that the time allows."""
        salt, until_s = self._salt(), time.monotonic() + seconds
        idle: list[Idle] = []
        while time.monotonic() < until_s:
            for length in self._lengths():
                began_s = time.monotonic()
                for request in self._prompt(length):
                    sent_s = time.perf_counter()
                    [outcome] = await self._client.one_by_one([request], salt, _DEADLINE_S)
                    self._served(outcome, sent_s)
                    if len(outcome.arrivals_s) > 1:
                        idle.append(Idle.of(outcome))
                now_s = time.monotonic()
                if now_s + _GROWTH * (now_s - began_s) > until_s:
                    break
        return idle

    async def growing(self, seconds: float) -> None:
        """Let a prompt grow, and another if that one is as long as the nodes take."""
        salt, until_s = self._salt(), time.monotonic() + seconds
        prompt: list[int] = []
        token_s = 0.0  # of the newest tokens; those behind take longer
        while (left_s := min(until_s - time.monotonic(), _DEADLINE_S)) > 0:
            if len(prompt) == self.longest:
                prompt = []
            length = min(self.longest, max(_LEAST_GROWING, round(_GROWTH * len(prompt))))
            if token_s:
                length = min(length, len(prompt) + int(left_s / (_GROWTH * token_s)))
            num_new = length - len(prompt)
            if num_new < 1:
                break
            prompt = prompt + self._ids(num_new)
            sent_s, request = time.perf_counter(), TimedRequest(0.0, "growing", prompt, _AT_LENGTH)
            [outcome] = await self._client.one_by_one([request], salt, _DEADLINE_S)
            self._served(outcome, sent_s)
            token_s = (time.perf_counter() - sent_s) / num_new

    async def streams(self, seconds: float) -> None:
        """Run streams beside each other, in batches of all sizes; large ones take long to fill."""
        batches = self._batches()
        weights = [_FILLED + batch for batch in batches]
        for batch, weight in zip(batches, weights, strict=True):
            await self._streams(batch, seconds * weight / sum(weights))

    async def answers(self, seconds: float) -> None:
        """Keep a batch of streams running whose ends, and so the prompts behind them, are apart."""
        batch, (least, longest) = min(_ANSWERED, self._limits.max_batch_size), _ANSWERS
        most = min(self.longest, int(_ROOM * self._tokens / batch)) - longest
        if most < 1:
            return
        requests = [
            TimedRequest(0.0, "answer", self._ids(min(_SHORT, most)), n)
            for n in self._random.choices(range(least, longest + 1), k=_MOST_ANSWERS)
        ]
        await self._closed(requests, batch, seconds)

    async def both(self, seconds: float) -> None:
        """Run streams, and prompts one at a time beside them: beside a full batch, too."""
        batches = self._batches()[::-2]
        for batch in batches:
            share_s = seconds / len(batches)
            await asyncio.gather(self._streams(batch, share_s), self.prompts(share_s))

    async def _streams(self, batch: int, seconds: float) -> None:
        """Keep `batch` streams running for so long, or for one round of them."""
        most = min(self.longest, int(_ROOM * self._tokens / batch) - _STREAM)
        context = self._between(1, most)  # of one round they are alike, as in one kind of load
        requests = [
            TimedRequest(0.0, "stream", self._ids(self._between(max(1, context // 2), context)), n)
            for n in [_STREAM] * (2 * batch)
        ]
        await self._closed(requests, batch, seconds)

    async def _closed(self, requests: list[TimedRequest], batch: int, seconds: float) -> None:
        run = await self._client.run_closed(requests, self._salt(), batch, max(0.1, seconds))
        start_s = time.perf_counter() - run.elapsed_s
        for outcome in run.outcomes:
            self._served(outcome, start_s)

    def _served(self, outcome: Outcome, start_s: float) -> None:
        """Note a request of a run that began then."""
        if outcome.sent_s:  # others were only about to be sent
            first_s = start_s + outcome.arrivals_s[0] if outcome.arrivals_s else None
            self.sent.append(Sent(start_s + outcome.sent_s, first_s, outcome.num_prompt))
        if outcome.end == "finished":
            self.prompt_lengths.add(outcome.num_prompt)
            self.contexts.add(outcome.num_prompt + outcome.num_output)

    def _lengths(self) -> Iterator[int]:
        """Yield lengths that grow, each drawn from around its step of the ladder."""
        step = 1.0
        while step < self.longest:
            yield min(self.longest, max(1, round(step * self._random.uniform(1, _GROWTH))))
            step *= _GROWTH
        yield self.longest

    def _prompt(self, length: int) -> Iterator[TimedRequest]:
        """Yield a prompt of that length; sometimes after one that it extends."""
        prompt = self._ids(length)
        if length > 1 and self._random.random() < _EXTENDED:
            first = prompt[: self._between(1, length - 1)]
            yield TimedRequest(0.0, "prompt", first, ANSWER)
        yield TimedRequest(0.0, "prompt", prompt, ANSWER)

    def _batches(self) -> list[int]:
        most = min(self._limits.max_batch_size, self._tokens // (2 * _STREAM))
        return token_ladder(max(1, most))

    def _between(self, least: int, most: int) -> int:
        """Draw a number whose logarithm is evenly distributed."""
        ratio = max(1.0, most / least)
        return max(1, round(least * math.pow(ratio, self._random.random())))

    def _ids(self, count: int) -> list[int]:
        return self._random.choices(PLAIN_IDS, k=count)

    def _salt(self) -> str:
        self._num_phases += 1
        return f"calibrate-{self._random.random()}-{self._num_phases}"
