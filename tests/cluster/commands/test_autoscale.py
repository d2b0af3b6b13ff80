"""`--autoscale`: nodes are started when load asks for them, and drained without losing a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from msgspec.structs import replace

from pdserve.commands.cluster.autoscale import (
    LEAST_LATE_S,
    MOST_TRIES,
    Autoscaler,
    ScaleStep,
    Starting,
    next_steps,
)
from pdserve.commands.cluster.config import ClusterConfig, Scale
from pdserve.commands.cluster.restarts import Restarts
from pdserve.protocol.status import (
    ClusterStatus,
    CoordinatorStatus,
    NodeStatus,
    RoleName,
    StateName,
)
from pdserve.settings.config import RoutingConfig
from pdserve.settings.speculation import SpeculationConfig
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import ConfigError
from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import Client
from tests.cluster.fleet import START_S, Fleet, fleet_config, poll, running
from tests.fakes.statuses import node_status
from tests.waits import until

NODES = [f"{kind}-{number}" for kind in ("prefill", "decode") for number in range(3)]


ONE_TO_THREE = Scale(1, 3)


def node(name: str, role: RoleName, state: StateName = "ready", requests: int = 0) -> NodeStatus:
    return node_status(name, role, state=state, running_requests=requests)


def steps(
    nodes: Sequence[NodeStatus],
    prefill: int,
    decode: int,
    scale: Scale = ONE_TO_THREE,
    unplaced: Sequence[str] = (),
    to_stand_by: Sequence[str] = (),
    starting: Starting | None = None,
) -> list[ScaleStep]:
    """What is done where so many nodes are desired."""
    started = [*(status.node_id for status in nodes), *unplaced]
    spare = [name for name in NODES if name not in started]
    status = told(nodes, prefill, decode)
    return next_steps(status, started, spare, scale, unplaced, to_stand_by, starting)


def told(nodes: Sequence[NodeStatus], prefill: int, decode: int) -> ClusterStatus:
    return ClusterStatus(
        model="m",
        mode="disaggregated",
        ready=True,
        inflight=0,
        nodes=list(nodes),
        coordinator=CoordinatorStatus(desired_nodes={"prefill": prefill, "decode": decode}),
    )


P0, P1 = node("prefill-0", "prefill"), node("prefill-1", "prefill")
D0, D1 = node("decode-0", "decode", requests=5), node("decode-1", "decode", requests=2)
WAITS = replace(node("prefill-2", "prefill", "loading"), is_standby=True)
LOADS = node("decode-1", "decode", "loading")
MOVED = [node(f"prefill-{number}", "decode", requests=9) for number in (1, 2)]


def stand_by(name: str) -> ScaleStep:
    return ScaleStep("start on standby", name)


@pytest.mark.parametrize(
    ("nodes", "desired", "done"),
    [
        # A pool lacks a node.
        ([P0, D0], (1, 2), ScaleStep("start", "decode-1")),
        ([P0, P1, D0], (3, 1), ScaleStep("start", "prefill-2")),
        ([P0, node("prefill-1", "decode"), D0], (1, 3), ScaleStep("start", "decode-1")),
        ([P0, D0, WAITS], (1, 2), None),  # the coordinator's, and so is a flip
        ([P0, D0, D1], (2, 1), None),
        ([P0, D0, D1, WAITS], (2, 1), None),
        ([P0, D0, *MOVED], (3, 3), stand_by("decode-1")),  # the coordinator says for which
        ([P0, D0, *MOVED, replace(LOADS, is_standby=True)], (3, 3), None),
        # None does, and one has more than it needs.
        ([P0, D0, D1], (1, 1), ScaleStep("retire", "decode-1")),  # the one with less to move
        ([P0, D0, D1], (1, 0), ScaleStep("retire", "decode-1")),
        ([P0, D0, D1, WAITS], (1, 1), ScaleStep("retire", "decode-1")),
        ([P0, node("prefill-1", "decode"), D0], (1, 1), ScaleStep("retire", "prefill-1")),
        ([P0, D0, D1, *MOVED], (1, 9), stand_by("decode-2")),  # as long as it is needed
        ([P0, D0, D1, *MOVED], (1, 3), ScaleStep("retire", "decode-1")),
        # All is well.
        ([P0, D0], (1, 1), stand_by("prefill-1")),
        ([P0, D0], (0, 0), stand_by("prefill-1")),  # 1 at least
        ([P0, D0, WAITS], (1, 1), None),
        # Nobody waits for the next node, but for fewer.
        ([P0, D0, LOADS], (1, 3), ScaleStep("start", "decode-2")),
        ([P0, D0, LOADS], (1, 2), None),
        ([P0, D0, LOADS], (1, 1), None),
        ([P0, D0, node("decode-1", "decode", "draining")], (1, 1), None),
    ],
)
def test_the_next_step(
    nodes: list[NodeStatus], desired: tuple[int, int], done: ScaleStep | None
) -> None:
    assert steps(nodes, *desired) == ([] if done is None else [done])


def test_all_that_lack_start_at_once() -> None:
    """But 3 at most, the shorter pool first, and none that the other pool has to spare."""
    started = ("prefill-1", "prefill-2", "decode-1")
    assert steps([P0, D0], 5, 2) == [ScaleStep("start", name) for name in started]
    assert steps([P0, D0, D1], 3, 1) == [ScaleStep("start", "prefill-1")]


def test_one_that_loads_to_stand_by_is_given_to_a_pool_that_lacks_one() -> None:
    assert steps([P0, D0, LOADS], 1, 2, to_stand_by=["decode-1"]) == []
    assert steps([P0, D0, LOADS], 1, 3, to_stand_by=["decode-1"]) == [
        ScaleStep("start", "decode-2")
    ]


class Seen:
    """What a cluster of P0, D0 and decode-1 shows, second by second."""

    def __init__(self, most_s: float = 900.0) -> None:
        self.clock = ManualClock()
        self.starting = Starting(self.clock, most_s)
        self.pids = {"prefill-0": 1, "decode-0": 2, "decode-1": 3}

    def for_s(self, seconds: float, *nodes: NodeStatus) -> None:
        for _ in range(round(seconds)):
            self.clock.advance(1.0)
            self.starting.look(told([P0, D0, *nodes], 1, 1), self.pids)

    def steps(
        self, decode: int, *nodes: NodeStatus, scale: Scale = ONE_TO_THREE
    ) -> list[ScaleStep]:
        return steps([P0, D0, *nodes], 1, decode, scale, starting=self.starting)


def test_a_node_that_never_works_is_replaced_and_goes() -> None:
    seen = Seen()
    seen.for_s(20, LOADS)
    seen.for_s(5, D1)  # so long do starts take
    seen.pids["decode-1"] = 4
    seen.for_s(20, LOADS)
    assert seen.steps(2, LOADS) == []
    seen.for_s(100, LOADS)
    assert seen.starting.late == ["decode-1"]
    assert seen.steps(2, LOADS) == [ScaleStep("start", "decode-2")]
    second = node("decode-2", "decode", "loading")
    assert seen.steps(2, LOADS, second) == [], "until that works"
    works = replace(second, state="ready")
    assert seen.steps(2, LOADS, works) == [ScaleStep("retire", "decode-1")]
    assert seen.steps(2, LOADS, scale=Scale(1, 2)) == [ScaleStep("start", "decode-2")]
    del seen.pids["decode-1"]
    seen.for_s(1)
    assert seen.steps(1) == [stand_by("prefill-1")]
    assert seen.steps(3) == [ScaleStep("start", "decode-2"), ScaleStep("start", "decode-1")], "last"


def test_starts_that_take_ten_times_as_long_are_waited_for() -> None:
    seen = Seen()
    seen.for_s(20, LOADS)
    seen.for_s(5, D1)
    seen.pids["decode-1"] = 4
    seen.for_s(102, LOADS)
    assert seen.starting.late, "one is replaced"
    seen.pids["decode-2"] = 5
    seen.for_s(98, LOADS, node("decode-2", "decode", "loading"))
    assert seen.starting.late == ["decode-1"], "but starts are known to take longer now"
    seen.for_s(5, D1, node("decode-2", "decode", "loading"))
    assert seen.starting.late == []


def test_a_node_that_ends_again_and_again_is_not_waited_for() -> None:
    seen = Seen()
    for pid in range(MOST_TRIES + 1):
        assert not seen.starting.late
        seen.pids["decode-1"] = 10 + pid
        seen.for_s(3, LOADS)
    assert seen.starting.late == ["decode-1"]
    seen.for_s(1, D1)
    assert seen.starting.late == [], "it works after all"


def test_nobody_waits_for_ever_and_a_coordinator_that_comes_back_is_no_start() -> None:
    seen = Seen(most_s=300.0)
    seen.for_s(5, D1)
    seen.for_s(2)  # nobody is there
    seen.for_s(5, D1)
    seen.pids["decode-1"] = 4
    seen.for_s(299, LOADS)
    assert seen.starting.late == [], "nobody knows how long starts take"
    assert 2 * LEAST_LATE_S < 299
    seen.for_s(3, LOADS)
    assert seen.steps(3, LOADS) == [ScaleStep("retire", "decode-1")], "to be started anew"


def test_what_the_coordinator_does_not_give_to_a_pool_is_started() -> None:
    """It does not know of the least numbers."""
    both = [ScaleStep("start", "prefill-1"), ScaleStep("start", "decode-1")]
    assert steps([P0, D0, WAITS], 1, 1, Scale(2, 3)) == both
    waits = replace(node("decode-2", "decode", "loading"), is_standby=True)
    assert steps([P0, P1, D0, D1, waits], 3, 1, Scale(2, 3)) == [ScaleStep("start", "prefill-2")], (
        "it waits for a flip, for which prefill nodes are not late enough yet"
    )
    assert steps([P0, P1, D0, D1, waits], 3, 2, Scale(2, 3)) == []
    assert steps([D0, D1, waits], 1, 1, Scale(2, 3)) == [], "an empty pool waits for no flip"


def test_what_no_machine_has_room_for_stands_in_nobodys_way() -> None:
    waits = ["prefill-1"]
    assert steps([P0, D0], 1, 2, unplaced=waits) == [], "it is asked for already"
    assert steps([P0, D0], 1, 1, unplaced=waits) == [], "as if it were on standby"
    assert steps([P0, D0, D1], 1, 1, unplaced=waits) == [ScaleStep("retire", "decode-1")]
    both = [*waits, "decode-1"]
    assert steps([P0, D0], 1, 1, unplaced=both) == [ScaleStep("retire", "decode-1")]
    assert steps([], 0, 0, Scale(0, 3), waits) == [ScaleStep("retire", "prefill-1")]


def test_a_cluster_that_sleeps_wakes_all_pools_at_once() -> None:
    scale = Scale(0, 3)
    assert steps([P0, D0, WAITS], 0, 0, scale) == [ScaleStep("retire", "prefill-0")]
    assert steps([D0, WAITS], 0, 0, scale) == [ScaleStep("retire", "decode-0")]
    assert steps([WAITS], 0, 0, scale) == [ScaleStep("retire", "prefill-2")]
    assert steps([], 0, 0, scale) == []
    assert steps([], 1, 1, scale) == [
        ScaleStep("start", "prefill-0"),
        ScaleStep("start", "decode-0"),
    ]
    assert steps([D0], 1, 1, scale) == [ScaleStep("start", "prefill-0")]


@pytest.mark.parametrize("wrong", ["3", "0:0", "4:2", "a:b", "1:2:3"])
def test_what_is_no_range_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"--autoscale {wrong}: must be MIN:MAX"):
        _ = ClusterConfig(autoscale=wrong).scale


async def _load(client: Client, number: int) -> NoReturn:
    while True:
        await client.complete(make_prompt(5500 + number), 500)


@pytest.mark.long
async def test_a_busy_pool_gets_the_node_on_standby_and_gives_it_back_with_its_streams(
    tiny_checkpoint: Path,
) -> None:
    """What makes it busy is the KV of its streams; there is room for 36,000 tokens."""
    # Streams whose texts repeat themselves would be over too soon.
    engine = {"kv_memory": "9MiB"}
    config = fleet_config(
        tiny_checkpoint, autoscale="1:2", engine=engine, speculation=SpeculationConfig(mode="off")
    )
    said: list[str] = []
    async with running(Fleet(config)) as fleet, Client(fleet.url) as client:
        assert fleet.started_nodes == ["prefill-0", "decode-0"]
        scale = config.scale
        assert scale is not None
        async with asyncio.TaskGroup() as group:
            keeping = [
                group.create_task(Autoscaler(fleet, scale, said.append).run()),
                group.create_task(Restarts(fleet, said.append).run()),
            ]
            await _said(said, "prefill-1 is on standby")
            waiting = (await fleet.status()).node("prefill-1")
            assert waiting is not None
            assert waiting.is_standby
            load = [group.create_task(_load(client, n)) for n in range(6)]
            taken = await _serving(fleet, "prefill-1")
            assert taken.role == "decode", "whatever it was started as"
            assert taken.incarnation == waiting.incarnation
            await _said(said, "decode-1 is on standby")
            for task in load:
                task.cancel()
            keeping[0].cancel()
            streams = [
                group.create_task(client.complete(make_prompt(90 + n), 2500)) for n in range(4)
            ]
            while not (await fleet.gauges("prefill-1"))["running_requests"]:
                await asyncio.sleep(0.02)
            retiring = [fleet.retire_node(name) for name in ("prefill-1", "decode-1")]
            ends = await asyncio.gather(*retiring)  # a process takes a second to end
            assert [end.returncode for end in ends] == [0, 0]
            assert not any(stream.done() for stream in streams)
            assert (await fleet.status()).coordinator.absent == [], "nobody misses them"
            outputs = [await stream for stream in streams]
            for task in keeping:
                task.cancel()
        assert [len(output.tokens) for output in outputs] == [2500] * 4
        assert fleet.started_nodes == ["prefill-0", "decode-0"]


async def _said(said: list[str], text: str) -> None:
    """Wait for something that the autoscaler tells."""

    async def look() -> bool:
        return text in said

    await poll(look, START_S, lambda: f"{text}: {said}")


async def _serving(fleet: Fleet, name: str) -> NodeStatus:
    """The node, once it serves."""
    found: NodeStatus | None = None

    async def look() -> bool:
        nonlocal found
        found = (await fleet.status()).node(name)
        return found is not None and found.state == "ready"

    await poll(look, START_S, lambda: f"{name}: {found}")
    assert found is not None
    return found


async def test_a_cluster_without_nodes_loses_no_request(tiny_checkpoint: Path) -> None:
    config = fleet_config(
        tiny_checkpoint,
        autoscale="0:1",
        routing=RoutingConfig(admission=False, sleep_after_s=0.5),
    )
    said: list[str] = []
    async with running(Fleet(config)) as fleet, Client(fleet.url) as client:
        before = await client.complete(make_prompt(20), 4)
        scale = config.scale
        assert scale is not None
        async with asyncio.TaskGroup() as group:
            keeping = [
                group.create_task(Autoscaler(fleet, scale, said.append).run()),
                group.create_task(Restarts(fleet, said.append).run()),
            ]
            await until(lambda: not fleet.started_nodes)
            status = await fleet.status()
            assert status.ready, "it takes requests"
            assert status.coordinator.desired_nodes == {"prefill": 0, "decode": 0}
            answers = [group.create_task(client.complete(make_prompt(20), 4)) for _ in range(3)]
            outputs = [await answer for answer in answers]
            await until(lambda: {"prefill-0 is ready", "decode-0 is ready"} <= set(said))
            for task in keeping:
                task.cancel()
        assert [output.tokens for output in outputs] == [before.tokens] * 3
