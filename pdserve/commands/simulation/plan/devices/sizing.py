"""How many nodes of a type a load needs, by arithmetic: queues by formula, nothing simulated.

Prompts are served one after the other in all nodes of a pool: their wait is that of M/D/c
(Sakasegawa's approximation), and exponential in its tail. Streams come and go at random, so a node
that has b of them on average has b + z sqrt(b) at times; even then a step is to keep the TPOT. What
is left free is a share of `rules.batch.SAFETY`, as in live clusters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, inf, log, sqrt
from statistics import NormalDist
from typing import Final

import msgspec

from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.simulation.machine import Machine
from pdserve.commands.simulation.plan.devices.roofline import NodeType
from pdserve.measured.calibration import Calibration
from pdserve.measured.perf_model import PerfModel, StepShape, chunk_pairs
from pdserve.rules.batch import SAFETY

MOST_NODES: Final = 1 << 14
_ROUNDS: Final = 60  # of a fixed point: each halves what is left, or better


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one size, as many a second, and what they are promised."""

    rate: float
    prompt: int  # tokens
    output: int
    promise: Promise
    target: float  # share of requests that is to be in time

    def at(self, rate: float) -> Load:
        """Return the same at another rate."""
        return replace(self, rate=rate)

    @property
    def tail(self) -> float:
        """How many mean waits the slowest one is that is still in time."""
        return -log(1 - self.target)

    @property
    def deviations(self) -> float:
        """How many standard deviations of a batch are counted on."""
        return NormalDist().inv_cdf(self.target)


class Pool(msgspec.Struct, frozen=True):
    """Nodes of one type that serve the load, or a part of it."""

    count: int
    what: str  # "prefill", "decode", "both"
    limit: str  # why there are not fewer, in words
    batch: float  # streams of a node, on average; 0: it has none


class NotServed(msgspec.Struct, frozen=True):
    """Why no number of such nodes serves a load."""

    limit: str  # "TTFT", "TPOT", "KV memory"
    why: str


@dataclass(frozen=True)
class Sized:
    """A type of node, and what its steps take."""

    node: NodeType
    calibration: Calibration

    @cached_property  # what is sized asks for it thousands of times
    def perf(self) -> PerfModel:
        """Predicts its steps."""
        return Machine.of(self.calibration).perf()

    def for_prompts(self, load: Load) -> Pool | NotServed:
        """Return how many of these keep the TTFT of the load's prompts, if they do nothing else."""
        prompt_s = self.perf.prefill_s(load.prompt, 0, self.calibration.limits.token_budget)
        if prompt_s >= load.promise.ttft_s:
            return NotServed("TTFT", f"one prompt takes {prompt_s:.3g} s on a node")
        sent = Machine.of(self.calibration).pulled_bytes(load.prompt, load.prompt)
        sent_s = sent / (self.node.num_devices * self.calibration.pull.bytes_per_s)
        count = _least(
            lambda n: (
                load.rate * sent_s < SAFETY * n
                and self.prompt_ttft_s(load, n) <= load.promise.ttft_s
            )
        )
        limit = f"arithmetic: a prompt takes {prompt_s:.3g} s"
        if sent_s > prompt_s:
            limit = f"network: the KV of a prompt takes {sent_s:.3g} s to send"
        return Pool(count, "prefill", limit, 0.0)

    def for_decodes(self, load: Load) -> Pool | NotServed:
        """Return how many of these keep the TPOT of the load's streams, if they do nothing else."""
        most, limit = self.most_streams(load)
        if most < 1:
            return self._too_slow(load, limit)
        count = _least(lambda n: self._at_times(load, self._streams(load, n, 0.0)) <= most)
        batch = self._streams(load, count, 0.0)
        return Pool(count, "decode", f"{limit}: {most} streams a node", batch)

    def for_both(self, load: Load) -> Pool | NotServed:
        """Return how many of these serve the load, each prompts and streams."""
        most, limit = self.most_streams(load)
        if most < 1:
            return self._too_slow(load, limit)
        alone = self._chunk(load, 0.0)
        if alone < 1 or self._first_s(load, alone) > load.promise.ttft_s:
            return NotServed("TTFT", "chunks of prompts that keep the TPOT are not over in time")
        count = _least(lambda n: not self._lack(load, n, most, limit))
        if count > MOST_NODES:
            return NotServed("TTFT", "prompts beside streams are not over in time")
        lacked = self._lack(load, count - 1, most, limit) if count > 1 else "one is enough"
        return Pool(count, "both", lacked, self._streams(load, count, load.rate / count))

    # ---- what a load would see -----------------------------------------------------------------

    def prompt_ttft_s(self, load: Load, count: int) -> float:
        """Return the TTFT that the load's share in time keeps, of so many nodes for prompts."""
        prompt_s = self.perf.prefill_s(load.prompt, 0, self.calibration.limits.token_budget)
        return _ttft_s(load, count, prompt_s, prompt_s)

    def shared_ttft_s(self, load: Load, count: int) -> float:
        """Return the same of nodes that have streams, too; infinite if these leave no time."""
        streams = self._streams(load, count, load.rate / count)
        chunk = self._chunk(load, self._at_times(load, streams))
        if chunk < 1:
            return inf
        limit_s = SAFETY * load.promise.tpot_s
        return _ttft_s(load, count, load.prompt / chunk * limit_s, self._first_s(load, chunk))

    # ---- parts ---------------------------------------------------------------------------------

    def most_streams(self, load: Load) -> tuple[int, str]:
        """Return the most streams of a step that keeps the TPOT, and what limits them."""
        limits, machine = self.calibration.limits, Machine.of(self.calibration)
        held = machine.layout.held_tokens(load.prompt + load.output)
        in_pool = int(machine.num_kv_tokens / held)
        most = min(limits.max_batch_size, in_pool)
        limit_s = SAFETY * load.promise.tpot_s
        found = _most(most, lambda n: self.step_s(load, n, 0.0) <= limit_s)
        if found < most:
            return found, "TPOT"
        return found, "KV memory" if in_pool < limits.max_batch_size else "the largest step"

    def step_s(self, load: Load, streams: float, chunk: float) -> float:
        """Return the time of a step with so many streams, and tokens of a prompt."""
        context = load.prompt + load.output // 2
        pairs = chunk_pairs(round(chunk), load.prompt // 2) if chunk >= 1 else 0
        shape = StepShape(round(streams + chunk), ceil(streams), pairs, round(streams * context))
        return self.perf.step_s(shape)

    def _streams(self, load: Load, count: int, prompts_per_s: float) -> float:
        """Return the streams of a node on average: a fixed point, as more make steps longer."""
        rate, streams = load.rate / count, 0.0
        for _ in range(_ROUNDS):
            step_s = self.step_s(load, streams, 0.0)
            if prompts_per_s:  # what is computed of prompts while a step lasts
                step_s = self.step_s(load, streams, prompts_per_s * load.prompt * step_s)
            now = rate * load.output * step_s
            if now > self.calibration.limits.max_batch_size:
                return now
            if abs(now - streams) < 0.01:
                break
            streams = now
        return streams

    def _at_times(self, load: Load, streams: float) -> float:
        """Return how many streams a node has at times that has so many on average."""
        return streams + load.deviations * sqrt(streams)

    def _lack(self, load: Load, count: int, most: int, limit: str) -> str:
        """Return of what so many nodes have too little for prompts and streams; empty: of nothing.

        `limit`: what limits them to `most` streams.
        """
        if self._at_times(load, self._streams(load, count, load.rate / count)) > most:
            return f"{limit}: {most} streams a node"
        ttft_s = self.shared_ttft_s(load, count)
        if ttft_s == inf:
            return "arithmetic: prompts leave streams no time"
        return "" if ttft_s <= load.promise.ttft_s else "TTFT: prompts wait beside streams"

    def _chunk(self, load: Load, streams: float) -> int:
        """Return the most tokens of a prompt that a step beside so many streams has time for."""
        limit_s, budget = SAFETY * load.promise.tpot_s, self.calibration.limits.token_budget
        return _most(budget, lambda n: self.step_s(load, streams, n) <= limit_s)

    def _first_s(self, load: Load, chunk: int) -> float:
        """Return what a prompt takes in steps with such a chunk each."""
        return ceil(load.prompt / chunk) * SAFETY * load.promise.tpot_s

    def _too_slow(self, load: Load, limit: str) -> NotServed:
        if limit == "TPOT":
            return NotServed(limit, f"a step of one takes {self.step_s(load, 1, 0.0) * 1e3:.3g} ms")
        return NotServed(limit, "a pool does not hold one of these requests")


def _ttft_s(load: Load, count: int, service_s: float, alone_s: float) -> float:
    """Return the TTFT where a prompt takes `service_s` of a node, and `alone_s` if none waits."""
    busy = load.rate * service_s / count
    return inf if busy >= SAFETY else alone_s + load.tail * _wait_s(busy, count, service_s)


def _wait_s(busy: float, count: int, service_s: float) -> float:
    """Return the mean wait of M/D/c, whose servers are busy for this share of the time."""
    queued: float = busy ** (sqrt(2 * (count + 1)) - 1)
    return queued / (count * (1 - busy)) * service_s / 2


def _most(bound: int, holds: Callable[[int], bool]) -> int:
    """Return the greatest number up to `bound` that holds, as all below do; 0: none does."""
    low, high = 0, bound
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _least(holds: Callable[[int], bool]) -> int:
    """Return the least number that holds; one above MOST_NODES: none does."""
    high = 1
    while high <= MOST_NODES and not holds(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high
