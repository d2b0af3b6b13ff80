"""A cluster of real processes that follows a public ramp for as long as one likes.

`make test-ramp MINUTES=60` runs it; the ramp of an hour takes so many minutes. Its nodes share the
cores of this machine, so their steps take as long as on a device of their own, and wait for that
without a core. Then a node more can do more on any machine.

A shorter ramp climbs faster, while nodes start and leave as ever: in LEAST_MINUTES the steep part
lasts two minutes, within which a start of ten seconds is still early enough.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import Final, NoReturn

import psutil
import pytest
from msgspec.structs import replace

from coordinator.pools.desired import IDLE_S
from coordinator.routing.sides import USUAL_TPOT_S, USUAL_TTFT_S
from pdserve.commands.cluster.autoscale import Autoscaler
from pdserve.commands.cluster.plan import COORDINATOR
from pdserve.commands.cluster.restarts import Restarts
from pdserve.engine.model_runner import ModelStep
from pdserve.protocol.status import ClusterStatus
from pdserve.settings.config import ProfileConfig
from pdserve.settings.speculation import SpeculationConfig
from pdserve.shared.errors import ClusterError
from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import Client
from tests.cluster.fleet import START_S, Fleet, fleet_config, read_gauges, running
from tests.cluster.forked import ForkedChild
from tests.simulation.test_scaled_ramp import RAMP, rate_at

MINUTES: Final = float(os.environ.get("PDSERVE_RAMP_MINUTES", "0"))
LEAST_MINUTES: Final = 12.0
HOUR_MIN, HIGHEST = RAMP[-1][0], max(rate for _, rate in RAMP)
MOST: Final = 4  # nodes of each pool
STEP_S, TOKEN_S = 0.02, 0.0004  # a step, and each token in it
KV: Final = "5MiB"  # of a node: for eight requests
PROMPT, ANSWER = 1600, 400  # tokens, in the median; of each up to twice as many, or half
HIGHEST_RATE: Final = 1.8  # requests/s: 1.6 nodes compute all the time, and KV is that of 2.6
LOOK_S: Final = 1.0
ENDS_S: Final = 120.0  # an answer, however busy the machine is
STUCK_S: Final = START_S + 30.0  # a node loads or drains for no longer
MOST_GROWTH = 64 << 20  # bytes of the coordinator, from the middle of the ramp to its end

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(round(60 * MINUTES + 1200)),
    pytest.mark.skipif(not MINUTES, reason="`make test-ramp MINUTES=60` says how long"),
]


def take_as_long_as_a_device() -> None:
    """In a node's process: its steps wait for a device of their own."""
    compute = ModelStep.launch

    def launch(self: ModelStep) -> None:
        compute(self)
        sleep(STEP_S + TOKEN_S * len(self._batch.token_ids))

    ModelStep.launch = launch  # type: ignore[method-assign]


class DeviceChild(ForkedChild):
    def _prepare(self, words: list[str]) -> Callable[[], None] | None:
        return None if words[0] == COORDINATOR else take_as_long_as_a_device


@dataclass(slots=True)
class Answer:
    """What a client heard."""

    at_s: float  # it was asked, from the beginning of the ramp
    ttft_s: float
    tpot_s: float

    @property
    def is_in_time(self) -> bool:
        return self.ttft_s <= USUAL_TTFT_S and self.tpot_s <= USUAL_TPOT_S


@dataclass(slots=True)
class Look:
    """What `/status` and `/metrics` of the coordinator said."""

    at_s: float
    text: str  # nodes, and what waits


@dataclass
class Watched:
    """What was seen of a cluster, a look a second, and what its autoscaler said."""

    began_s: float = 0.0
    said: list[tuple[float, str]] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    node_s: float = 0.0
    desired: list[int] = field(default_factory=list)  # nodes of both pools
    serving: list[int] = field(default_factory=list)
    coordinator_bytes: list[int] = field(default_factory=list)
    longest_s: dict[str, float] = field(default_factory=dict)  # node: loading, or draining
    _since: dict[tuple[str, str], float] = field(default_factory=dict)

    def say(self, text: str) -> None:
        """As an autoscaler's `say`."""
        self.said.append((monotonic() - self.began_s, text))

    async def watch(self, fleet: Fleet) -> NoReturn:
        before_s = monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            with suppress(ClusterError):
                await self._look(fleet, before_s)
                before_s = monotonic()

    async def _look(self, fleet: Fleet, before_s: float) -> None:
        status, now_s = await fleet.status(), monotonic()
        self.node_s += len(fleet.started_nodes) * (now_s - before_s)
        self.desired.append(sum(status.coordinator.desired_nodes.values()))
        self.serving.append(sum(node.state == "ready" for node in status.nodes))
        gauges = await read_gauges(fleet.url.removeprefix("http://"))
        self.looks.append(Look(now_s - self.began_s, _told(status, gauges)))
        memory = psutil.Process(fleet.pid(COORDINATOR)).memory_info()
        self.coordinator_bytes.append(memory.rss)
        busy = {
            (node.node_id, node.state)
            for node in status.nodes
            if node.state in ("loading", "draining") and not node.is_standby
        }
        self._since = {key: self._since.get(key, now_s) for key in busy}
        for (name, _), since_s in self._since.items():
            self.longest_s[name] = max(self.longest_s.get(name, 0.0), now_s - since_s)

    @property
    def turns(self) -> int:
        """How often the desired number rose after it had fallen, or fell after it had risen."""
        steps = [b - a for a, b in pairwise(self.desired) if a != b]
        return sum(a * b < 0 for a, b in pairwise(steps))


def _told(status: ClusterStatus, gauges: dict[str, float]) -> str:
    """Of each pool: nodes that work, are desired, and load; what waits for them, and their load."""
    text = []
    for role in ("prefill", "decode"):
        pool = [node for node in status.nodes if node.role == role and not node.is_standby]
        ready = [node for node in pool if node.state == "ready"]
        desired, load = status.coordinator.desired_nodes.get(role, 0), gauges[f"{role}_pool_load"]
        running = sum(node.running_requests for node in ready)
        waiting = sum(node.waiting_requests for node in ready)
        queued = sum(node.queued_tokens for node in ready)
        text.append(
            f"{len(ready)} of {desired} (+{len(pool) - len(ready)}), load {load:4.2f}, "
            f"{running:2} run, {waiting:2} wait, {queued:5} tokens queued"
        )
    standby = sum(node.is_standby for node in status.nodes)
    return f"P {text[0]} | D {text[1]} | {standby} on standby, {status.waiting} in line"


def told_by_minute(answers: Sequence[Answer], watched: Watched) -> list[str]:
    """What one needs to see why promises were broken: each minute's requests, nodes and changes."""
    lines = []
    for minute in range(int(watched.looks[-1].at_s // 60) + 1):
        part = [one for one in answers if minute <= one.at_s / 60 < minute + 1]
        late = sum(not one.is_in_time for one in part)
        ttft_s = max((one.ttft_s for one in part), default=0.0)
        tpot_s = max((one.tpot_s for one in part), default=0.0)
        lines.append(
            f"minute {minute}: {len(part)} requests, {late} late; worst TTFT {ttft_s:.1f} s, "
            f"TPOT {tpot_s:.3f} s"
        )
        looks = [look for look in watched.looks if minute <= look.at_s / 60 < minute + 1]
        events = [(look.at_s, look.text) for look in looks[:: len(looks) // 4 + 1]]
        events += [event for event in watched.said if minute <= event[0] / 60 < minute + 1]
        lines += [f"  {at_s:5.0f} s  {text}" for at_s, text in sorted(events)]
    return lines


async def answer(client: Client, random: Random, at_s: float) -> Answer:
    """Ask for one, of a prompt that nobody has sent before."""
    prompt = make_prompt(round(PROMPT * random.uniform(0.5, 2.0)), random.randrange(1 << 30))
    number, began_s = round(ANSWER * random.uniform(0.5, 2.0)), monotonic()
    async with client.stream(prompt, number) as stream:
        await stream.read(1)
        first_s = monotonic()
        output = await stream.rest()
    assert len(output.tokens) == number, output
    return Answer(at_s, first_s - began_s, (monotonic() - first_s) / (number - 1))


def arrivals(seconds: float) -> Iterator[float]:
    """Times of requests, from the beginning of the ramp: a Poisson process of changing rate."""
    random = Random(1)
    now_s = random.expovariate(HIGHEST_RATE)
    while now_s < seconds:
        if random.random() < rate_at(now_s / seconds * HOUR_MIN) / HIGHEST:
            yield now_s
        now_s += random.expovariate(HIGHEST_RATE)


async def sent(client: Client, times: Iterator[float]) -> list[Answer]:
    """Send a request at each of these times, whatever comes of those before."""
    random, began_s = Random(2), monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for at_s in times:
            await asyncio.sleep(max(0.0, began_s + at_s - monotonic()))
            tasks.append(group.create_task(answer(client, random, at_s)))
    return [task.result() for task in tasks]


async def test_a_ramp_is_followed_by_real_processes(tiny_checkpoint: Path) -> None:
    assert MINUTES >= LEAST_MINUTES, f"{MINUTES:g} minutes are too few to follow: {LEAST_MINUTES:g}"
    config = fleet_config(
        tiny_checkpoint,
        autoscale=f"1:{MOST}",
        engine={"kv_memory": KV, "max_model_len": 4096},
        speculation=SpeculationConfig(mode="off"),
    )
    config = replace(config, profile=ProfileConfig())  # of steps that take as long as real ones
    watched, seconds = Watched(), 60 * MINUTES
    async with (
        running(Fleet(config, make_child=DeviceChild)) as fleet,
        Client(fleet.url, ENDS_S) as client,
    ):
        scale = config.scale
        assert scale is not None
        process = psutil.Process(fleet.pid(COORDINATOR))
        fds = process.num_fds()
        async with asyncio.TaskGroup() as group:
            watched.began_s = monotonic()
            keeping = [
                group.create_task(Autoscaler(fleet, scale, watched.say).run()),
                group.create_task(Restarts(fleet, watched.say).run()),
                group.create_task(watched.watch(fleet)),
            ]
            answers = await sent(client, arrivals(seconds))
            peak = max(watched.serving)
            node_s, bytes_of = watched.node_s, watched.coordinator_bytes[:]
            async with asyncio.timeout(peak * (IDLE_S + 30.0)):
                while sum((await fleet.status()).coordinator.desired_nodes.values()) > 2:
                    await asyncio.sleep(LOOK_S)
            for task in keeping:
                task.cancel()
        in_time = sum(one.is_in_time for one in answers) / len(answers)
        print(  # noqa: T201
            f"{len(answers)} requests: {in_time:.1%} in time; "
            f"at most {peak} nodes, {node_s / 3600:.2f} node-hours; "
            f"{watched.turns} turns; coordinator {bytes_of[0] >> 20}, {max(bytes_of) >> 20}, "
            f"{bytes_of[-1] >> 20} MiB, {process.num_fds() - fds} more descriptors; "
            f"longest {watched.longest_s}",
            *told_by_minute(answers, watched),
            sep="\n",
        )
        assert peak > 3, "the cluster did not grow"
        assert in_time >= 0.97
        assert node_s <= 0.74 * 2 * MOST * seconds
        assert max(watched.longest_s.values(), default=0.0) <= STUCK_S
        assert watched.turns <= 4, f"it swings: {watched.desired}"
        assert bytes_of[-1] - bytes_of[len(bytes_of) // 2] <= MOST_GROWTH
        assert process.num_fds() <= fds + 16
