"""A simulated host: what its nodes and services wait for beside each other."""

from __future__ import annotations

from functools import partial

import pytest

from pdserve.commands.simulation.events import Events
from pdserve.commands.simulation.host import Host, Service
from pdserve.commands.simulation.messages import Server
from pdserve.measured.calibration import ServiceTimes, Sharing
from pdserve.measured.perf_model import StepShape

PROMPT, DECODE = StepShape(100, 1, 5050, 0), StepShape(2, 2, 0, 200)
BUS = Sharing(
    decode_beside_decode=1.6,
    decode_beside_prompt=1.3,
    prompt_beside_decode=1.2,
    prompt_beside_prompt=1.1,
)


class World:
    """A host with one thread a node, and when what was begun there ended."""

    def __init__(self, sharing: Sharing, *nodes: str, owner: str | None = None) -> None:
        self.events = Events()
        self.host = Host("host", self.events, sharing)
        for node in nodes:
            self.host.join(node, owner)
        self.ends_s: dict[str, float] = {}

    def begin(self, node: str, seconds: float, shape: StepShape = DECODE) -> None:
        self.host.begin(node, shape, seconds, partial(self.ended, node))

    def ended(self, who: str) -> None:
        self.ends_s[who] = self.events.now_s

    def service(self, *cores: int) -> Service:
        return Service(self.events, self.host, cores)

    def run(self) -> dict[str, float]:
        self.events.run()
        return {who: pytest.approx(s) for who, s in self.ends_s.items()}


@pytest.mark.parametrize(
    ("own", "other", "factor"),
    [(DECODE, DECODE, 1.6), (DECODE, PROMPT, 1.3), (PROMPT, DECODE, 1.2), (PROMPT, PROMPT, 1.1)],
)
def test_kinds_of_steps_cost_each_other_what_was_measured(
    own: StepShape, other: StepShape, factor: float
) -> None:
    world = World(BUS, "a", "b")
    world.begin("a", 10.0, other)
    world.begin("b", 0.01, own)
    assert world.run()["b"] == 0.01 * factor
    world.begin("b", 0.01, own)
    assert world.run()["b"] == world.ends_s["a"] + 0.01


def test_a_step_is_slower_only_while_another_one_runs() -> None:
    world = World(BUS, "a", "b")
    world.begin("a", 0.1)
    world.events.at(0.05, lambda: world.begin("b", 0.01, PROMPT))
    # Beside the prompt, which takes 12 ms, a decodes 12 / 1.3 ms of its 100.
    assert world.run() == {"b": 0.062, "a": 0.1 + 0.012 - 0.012 / 1.3}


def test_a_service_takes_time_of_steps_only_where_no_core_is_idle() -> None:
    world = World(Sharing(cores=2), "p", "d")
    client = world.service(0, 1)
    world.begin("d", 0.1)
    client.do(0.01, partial(world.ended, "sent"))
    assert world.run() == {"sent": 0.01, "d": 0.1}
    world = World(Sharing(cores=2), "p", "d")
    client = world.service(0, 1)
    world.begin("p", 0.1)
    world.begin("d", 0.1)
    client.do(0.01, partial(world.ended, "sent"))
    assert world.run() == {"sent": 0.02, "p": 0.11, "d": 0.1}  # in turn
    assert client.busy_s == pytest.approx(0.02)


def test_services_on_one_core_slow_each_other_and_a_second_core_ends_it() -> None:
    for cores, end_s in ((1, 0.02), (2, 0.01)):
        world = World(Sharing(cores=cores))
        for name in ("coordinator", "client"):
            world.service(*range(cores)).do(0.01, partial(world.ended, name))
        assert world.run() == {"coordinator": end_s, "client": end_s}


def test_a_service_does_one_thing_after_the_other() -> None:
    """So one that takes 5 ms for a request does 200 a second, however many come."""
    world = World(Sharing(cores=1))
    coordinator = world.service(0)
    for number in range(300):
        world.events.at(number / 300, partial(coordinator.do, 0.005, lambda: world.ended("last")))
    assert world.run() == {"last": 300 / 200}
    assert coordinator.busy_s == pytest.approx(1.5)


def test_a_node_that_computes_has_an_event_loop_that_wants_its_core_too() -> None:
    """So a service has less than half of it, and the step more."""
    world = World(Sharing(cores=1, node_threads=1.5), "d")
    world.begin("d", 0.1)
    world.service(0).do(0.01, partial(world.ended, "sent"))
    assert world.run() == {"sent": 0.025, "d": 0.11}


def test_services_take_turns_on_cores_that_are_busy_whatever_runs_there() -> None:
    """A node that decodes has two threads there, but a service looks for an idle core only."""
    world = World(Sharing(cores=2, node_threads=1.5), "p", "d")
    world.begin("p", 0.1, PROMPT)
    world.begin("d", 0.1, DECODE)
    client = world.service(0, 1)
    client.do(0.01, partial(world.ended, "first"))
    client.do(0.01, partial(world.ended, "second"))
    assert world.run() == {"first": 0.02, "second": 0.045, "p": 0.11, "d": 0.11}


def test_a_service_that_is_behind_hands_on_tokens_of_several_steps_in_one_round() -> None:
    world = World(Sharing(cores=1))
    server = Server(world.service(0), ServiceTimes(request_s=0.01, step_s=0.005, token_s=0.001))
    server.request(0, partial(world.ended, "request"))
    for step in ("first", "second", "third"):
        server.step(2, partial(world.ended, step))
    world.events.at(0.012, lambda: server.step(2, partial(world.ended, "later")))
    ended_s = 0.01 + 0.005 + 3 * 2 * 0.001
    assert world.run() == {
        "request": 0.01,
        **dict.fromkeys(("first", "second", "third"), ended_s),
        "later": ended_s + 0.007,  # the round before it had begun
    }


def test_a_node_of_a_pair_leaves_no_core_of_the_pair_idle() -> None:
    world = World(Sharing(cores=2), "p", "d", owner="pair")
    world.begin("d", 0.1)
    world.service(0, 1).do(0.01, partial(world.ended, "sent"))
    assert world.run() == {"sent": 0.02, "d": 0.105}  # one of its two threads had half a core
    wide = World(Sharing(cores=4), "p0", "d0", owner="a")
    wide.host.join("p1", "b")
    wide.begin("d0", 0.1)
    wide.service(0, 1, 2, 3).do(0.01, partial(wide.ended, "sent"))
    assert wide.run() == {"sent": 0.01, "d0": 0.1}


def test_more_nodes_than_cores_share_those_that_they_are_started_on() -> None:
    """As `pdserve up` places them: the first and the third are on one core."""
    world = World(Sharing(cores=2), "prefill-0", "prefill-1", "decode-0")
    for node in ("prefill-0", "prefill-1", "decode-0"):
        world.begin(node, 0.1)
    assert world.run() == {"prefill-0": 0.2, "prefill-1": 0.1, "decode-0": 0.2}


def test_services_keep_off_steps_where_nodes_have_cores_to_spare() -> None:
    assert World(Sharing(cores=4), "p", "d").host.spare_cores == [1, 3]
    assert World(Sharing(cores=2), "p", "d").host.spare_cores == [0, 1]
