"""The requests that a client sends, and when: the same for all candidates.

A workload is a sequence of requests whose contents do not depend on the rate. The times of a run's
requests are scaled so that they arrive at exactly that rate, on average over the run: 200 Poisson
arrivals alone would be 7 % off, and the first 200 requests of a trace whose load rises, 40 %. Two
servers get the same prompts at the same times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice, repeat
from typing import Protocol

import numpy as np

from pdserve.commands.bench.load.client import PLAIN_IDS
from pdserve.commands.bench.load.scenarios import RequestKind, Scenario, draw
from pdserve.commands.bench.load.traces import TraceRow, mean_rate

# Purposes of random numbers: independent streams.
_ARRIVALS, _KINDS, _LENGTHS, _TOKENS, _BLOCKS = range(5)


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request and the time at which it is due."""

    at_s: float  # since the start of the run
    kind: str
    prompt: list[int]
    num_output: int  # exact number of output tokens
    after: int | None = None  # index of the request whose end it waits for, whatever `at_s` is
    think_s: float = 0.0  # from that end until it is due
    model: str = ""  # empty: the client's


@dataclass(frozen=True, slots=True)
class Sketch:
    """A request without its tokens, and the time at which it is due."""

    at_s: float
    kind: str
    number: int  # among the requests of its workload
    num_prompt: int
    num_output: int
    blocks: Sequence[int] = ()  # ids of the prompt's blocks, if others may share them
    after: int | None = None  # number of the request whose end it waits for; that one comes before
    think_s: float = 0.0


class Workload(Protocol):
    """Generates requests for any rate."""

    block_tokens: int  # of the blocks that sketches name

    def sketched(self, rate: float, count: int, turn: int = 0) -> Iterator[Sketch]:
        """Yield the requests of `timed`, one by one and without their tokens."""
        ...

    def timed(
        self, rate: float, count: int, turn: int = 0, contents: int = 0
    ) -> list[TimedRequest]:
        """Return `count` requests, or all there are, at `rate` requests per second.

        Each `turn` has others: turn 0 the first ones. With other `contents` they have other tokens,
        and are the same in everything else.
        """
        ...

    def first(self, count: int, contents: int = 0) -> list[TimedRequest]:
        """Return the first `count` requests, all at time 0; `contents` as of `timed`."""
        ...


class SyntheticWorkload:
    """A scenario's mixture of requests, arriving as a Poisson process."""

    block_tokens = 1  # no prompts share any

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._scenario = scenario
        self._seed = seed

    def timed(
        self, rate: float, count: int, turn: int = 0, contents: int = 0
    ) -> list[TimedRequest]:
        """As Workload.timed."""
        return [self._filled(sketch, contents) for sketch in self.sketched(rate, count, turn)]

    def sketched(self, rate: float, count: int, turn: int = 0) -> Iterator[Sketch]:
        """As Workload.sketched."""
        seed = [self._seed, _ARRIVALS, turn] if turn else [self._seed, _ARRIVALS]
        times = poisson_times(rate, count, seed)
        return map(self._sketch, times, islice(self._kinds(), turn * count, None))

    def first(self, count: int, contents: int = 0) -> list[TimedRequest]:
        """As Workload.first."""
        kinds = self._kinds()
        return [self._filled(self._sketch(0.0, next(kinds)), contents) for _ in range(count)]

    def _kinds(self) -> Iterator[tuple[int, RequestKind]]:
        """Yield numbered kinds from a shuffled deck, so that short runs have the mixture too."""
        rng = np.random.default_rng([self._seed, _KINDS])
        deck = [kind for kind in self._scenario.kinds for _ in range(kind.cards)]
        if len(deck) == 1:  # nothing to shuffle
            yield from zip(count(), repeat(deck[0]))
        number = 0
        while True:
            for card in rng.permutation(len(deck)).tolist():
                yield number, deck[card]
                number += 1

    def _sketch(self, at_s: float, numbered: tuple[int, RequestKind]) -> Sketch:
        number, kind = numbered
        rng = np.random.default_rng([self._seed, _LENGTHS, number])
        num_prompt, num_output = draw(kind.prompt, rng), draw(kind.output, rng)
        return Sketch(at_s, kind.name, number, num_prompt, num_output)

    def _filled(self, sketch: Sketch, contents: int = 0) -> TimedRequest:
        seed = [self._seed, _TOKENS, sketch.number]
        prompt = random_ids(sketch.num_prompt, _with(contents, seed))
        return TimedRequest(sketch.at_s, sketch.kind, prompt, sketch.num_output)


class TraceWorkload:
    """A trace whose lengths and times are scaled to the measurement.

    Prompt tokens are random, but equal block ids give equal tokens. A trace's block becomes
    `round(block * factor)` tokens, and every length is scaled by exactly this ratio. Requests that
    are still too long for the model are cut at `most_tokens`, the prompt first.

    A request that follows another one is sent its time to think after that one's end, so an
    overloaded server gets it later: a closed loop within an open one. It comes right after the
    request that began its conversation. Times to think are not scaled.
    """

    def __init__(
        self, rows: Sequence[TraceRow], factor: float, most_tokens: int, seed: int
    ) -> None:
        """Replay a trace; `factor`: on lengths; `most_tokens`: of prompt and output together."""
        self._rows = rows
        self._seed = seed
        self._most_tokens = most_tokens
        block_tokens = rows[0].block_tokens
        self.block_tokens = max(1, round(block_tokens * factor))
        self.factor = self.block_tokens / block_tokens
        self.num_cut = sum(sum(self._scaled(row)) > most_tokens for row in rows)

    def timed(
        self, rate: float, count: int, turn: int = 0, contents: int = 0
    ) -> list[TimedRequest]:
        """As Workload.timed. Raises ConfigError as `mean_rate`."""
        sketches = list(self.sketched(rate, count, turn))
        places = {sketch.number: place for place, sketch in enumerate(sketches)}
        return [
            self._filled(sketch, None if sketch.after is None else places[sketch.after], contents)
            for sketch in sketches
        ]

    def sketched(self, rate: float, count: int, turn: int = 0) -> Iterator[Sketch]:
        """As Workload.sketched; later turns begin anew where the trace ends. Raises as `timed`."""
        first = turn * count % max(1, len(self._rows) - count + 1)
        rows = self._rows[first : first + count]
        slower, began_s = mean_rate(rows) / rate, rows[0].at_s if turn else 0.0
        followers: dict[int, list[int]] = defaultdict(list)  # by the index of what they follow
        for index, row in enumerate(rows):
            if row.follows is not None and row.follows >= first:
                followers[row.follows - first].append(index)
        return (
            self._sketch(first + index, rows[index], at_s, parent)
            for root, row in enumerate(rows)
            if row.follows is None or row.follows < first
            for at_s in [(row.at_s - began_s) * slower]
            for index, parent in _conversation(root, followers, first)
        )

    def first(self, count: int, contents: int = 0) -> list[TimedRequest]:
        """As Workload.first."""
        sketches = (self._sketch(i, row, 0.0) for i, row in enumerate(self._rows[:count]))
        return [self._filled(sketch, None, contents) for sketch in sketches]

    def _sketch(self, number: int, row: TraceRow, at_s: float, after: int | None = None) -> Sketch:
        num_prompt, num_output = self._scaled(row)
        num_output = min(num_output, self._most_tokens - 1)
        num_prompt = min(num_prompt, self._most_tokens - num_output)
        think_s = 0.0 if after is None else row.think_s
        return Sketch(at_s, row.kind, number, num_prompt, num_output, row.blocks, after, think_s)

    def _filled(self, sketch: Sketch, after: int | None, contents: int = 0) -> TimedRequest:
        seeds = [_with(contents, [self._seed, _BLOCKS, block]) for block in sketch.blocks]
        prompt = [token for seed in seeds for token in random_ids(self.block_tokens, seed)]
        missing = sketch.num_prompt - len(prompt)
        if missing > 0:  # its last block is nobody else's, or nothing is known of its blocks
            prompt += random_ids(missing, _with(contents, [self._seed, _TOKENS, sketch.number]))
        return TimedRequest(
            sketch.at_s,
            sketch.kind,
            prompt[: sketch.num_prompt],
            sketch.num_output,
            after,
            sketch.think_s,
        )

    def _scaled(self, row: TraceRow) -> tuple[int, int]:
        return max(1, int(row.num_prompt * self.factor)), max(1, int(row.num_output * self.factor))


def _conversation(
    root: int, followers: Mapping[int, Sequence[int]], first: int
) -> Iterator[tuple[int, int | None]]:
    """Yield the rows of a conversation: (index, number of the one that it follows)."""
    left: list[tuple[int, int | None]] = [(root, None)]
    while left:
        index, parent = left.pop()
        yield index, parent
        left += ((follower, first + index) for follower in reversed(followers.get(index, ())))


def trace_factor(rows: Sequence[TraceRow], max_model_len: int) -> float:
    """Return the factor on lengths, at most 1, with which 99 of 100 requests fit the model."""
    p99 = float(np.percentile([row.num_prompt + row.num_output for row in rows], 99))
    return min(1.0, max_model_len / p99)


def poisson_times(rate: float, count: int, seed: Sequence[int]) -> list[float]:
    """Return when `count` requests arrive within `count / rate` seconds, as in a Poisson process.

    That is a Poisson process of which it is known how many requests arrive in this time.
    """
    sums = np.random.default_rng(seed).exponential(size=count + 1).cumsum()
    times: list[float] = (sums[:-1] / sums[-1] * (count / rate)).tolist()
    return times


def draw_prompt(kind: RequestKind, seed: Sequence[int], contents: int = 0) -> list[int]:
    """Make one prompt of that kind; the same for the same seed and contents."""
    num_tokens = draw(kind.prompt, np.random.default_rng([*seed, _LENGTHS]))
    return random_ids(num_tokens, _with(contents, [*seed]))


def _with(contents: int, seed: list[int]) -> list[int]:
    return [*seed, contents] if contents else seed


def random_ids(count: int, seed: Sequence[int]) -> list[int]:
    """Return `count` plain token ids; the same for the same seed."""
    ids: list[int] = np.random.default_rng(seed).choice(PLAIN_IDS, count).tolist()
    return ids
