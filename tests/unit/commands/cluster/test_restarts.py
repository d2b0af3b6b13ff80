"""When processes that end are started again, and what comes of it if the system has none."""

import asyncio

import pytest

from pdserve.commands.cluster.autoscale import Autoscaler
from pdserve.commands.cluster.child import Exit, Process
from pdserve.commands.cluster.config import ClusterConfig, Scale
from pdserve.commands.cluster.plan import COORDINATOR, ProcessPlan
from pdserve.commands.cluster.restarts import MOST_S, STABLE_S, Backoff, Restarts
from pdserve.commands.cluster.supervisor import Cluster
from pdserve.protocol.status import ClusterStatus, CoordinatorStatus
from pdserve.settings.config import CoordinatorConfig, NodeConfig
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import ClusterError
from pdserve.shared.process.exit_codes import SICK


def test_the_pause_doubles_up_to_a_limit():
    backoff = Backoff(ManualClock())
    pauses = [backoff.ended() for _ in range(9)]
    assert pauses[:6] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4]
    assert pauses[6:] == [MOST_S] * 3


def test_a_minute_of_being_ready_begins_it_anew():
    clock = ManualClock()
    backoff = Backoff(clock)
    backoff.ended()
    clock.advance(10 * STABLE_S)  # it was loading all the time
    assert backoff.ended() == 0.4
    backoff.is_ready()
    clock.advance(0.9 * STABLE_S)
    assert backoff.ended() == 0.8
    backoff.is_ready()
    clock.advance(STABLE_S)
    assert backoff.ended() == 0.2
    assert backoff.ended() == 0.4


class ClusterOfOne:
    """A cluster with a process that has ended, and that the system cannot start at first."""

    def __init__(self, num_refused: int, *, on_standby: bool = False) -> None:
        self.num_refused = num_refused
        self.on_standby = on_standby
        self.exits: asyncio.Queue[Exit] = asyncio.Queue()
        self.exits.put_nowait(Exit("decode-0", 17, SICK, "device_fault: gone"))
        self.is_up = False

    async def next_exit(self) -> Exit:
        return await self.exits.get()

    def is_running(self, name: str) -> bool:
        return self.is_up

    def is_retired(self, name: str) -> bool:
        return False

    def begins_on_standby(self, name: str) -> bool:
        return self.on_standby

    async def start_node(self, name: str, *, on_standby: bool = False) -> None:
        assert on_standby is self.on_standby
        if self.num_refused:
            self.num_refused -= 1
            raise BlockingIOError(11, "Resource temporarily unavailable")
        self.is_up = True


@pytest.mark.parametrize("on_standby", [False, True])
async def test_a_process_that_cannot_be_started_now_is_tried_again_as_what_it_was(on_standby):
    said: asyncio.Queue[str] = asyncio.Queue()
    restarts = Restarts(ClusterOfOne(num_refused=1, on_standby=on_standby), said.put_nowait)
    running = asyncio.create_task(restarts.run())
    async with asyncio.timeout(30):
        assert [await said.get() for _ in range(3)] == [
            "decode-0 (pid 17) ended with exit code 3 (a node that was sick): device_fault: gone; "
            "starting it again in 0.2 s",
            "decode-0 cannot be started: [Errno 11] Resource temporarily unavailable; trying again "
            "in 0.4 s",
            "decode-0 is ready again",
        ]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


class ProcessOfNobody(Process):
    """Ends with its first signal."""

    pid = 17

    def send_signal(self, number: int) -> None:
        if self.is_running:
            self._end.set_result(Exit(self.name, self.pid, -number, ""))


class Machine:
    """A site that cannot start processes while it is full."""

    http_address = grpc_address = "127.0.0.1:1"  # where nobody listens
    supervisor_token = warning = ""

    def __init__(self) -> None:
        self.is_full = False
        self.started: list[str] = []

    async def plan(self) -> list[ProcessPlan]:
        coordinator = ProcessPlan(COORDINATOR, COORDINATOR, CoordinatorConfig())
        return [coordinator, ProcessPlan("decode-0", "decode", NodeConfig())]

    def start(self, name: str, *_: object) -> ProcessOfNobody:
        if self.is_full:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        self.started.append(name)
        return ProcessOfNobody(name)

    def leave(self, name: str) -> None:
        pass


async def test_a_retired_node_that_cannot_be_started_stays_one_that_could_be():
    cluster = Cluster(ClusterConfig(port=0, start_s=0.01), site=(machine := Machine()))
    await cluster.spawn()
    await cluster.retire_node("decode-0")
    machine.is_full = True
    with pytest.raises(BlockingIOError):
        await cluster.start_node("decode-0")
    assert cluster.started_nodes == []


async def test_of_two_who_start_a_node_at_the_same_time_one_does():
    cluster = Cluster(ClusterConfig(port=0, start_s=0.01), site=(machine := Machine()))
    await cluster.spawn()
    await cluster.kill_node("decode-0")
    both = (cluster.start_node("decode-0") for _ in range(2))
    errors = await asyncio.gather(*both, return_exceptions=True)
    assert machine.started == [COORDINATOR, "decode-0", "decode-0"]
    assert any("is still running" in str(error) for error in errors)


class ClusterThatLacksOne(ClusterOfOne):
    """Its load asks for a decode node."""

    config = ClusterConfig()
    unplaced_nodes: tuple[str, ...] = ()
    node_names = ("decode-0",)

    def pid(self, name: str) -> int:
        return 18

    @property
    def started_nodes(self) -> list[str]:
        return ["decode-0"] if self.is_up else []

    async def status(self) -> ClusterStatus:
        coordinator = CoordinatorStatus(desired_nodes={"decode": 1})
        return ClusterStatus(
            model="m", mode="colocated", ready=False, inflight=0, nodes=[], coordinator=coordinator
        )


async def test_a_node_that_load_asks_for_is_tried_again_until_the_system_has_a_process():
    said: asyncio.Queue[str] = asyncio.Queue()
    cluster = ClusterThatLacksOne(num_refused=1)
    scaling = asyncio.create_task(
        Autoscaler(cluster, Scale(0, 1), said.put_nowait, look_s=0.001).run()
    )
    async with asyncio.timeout(30):
        told = [await said.get() for _ in range(4)]
    assert told[1].startswith("decode-0 cannot be started: [Errno 11]")
    assert told[3] == "decode-0 is ready"
    scaling.cancel()
    await asyncio.gather(scaling, return_exceptions=True)


async def test_what_somebody_else_has_started_during_the_pause_is_left_alone():
    class StartedElsewhere(ClusterOfOne):
        running: tuple[str, ...] = ()

        def is_running(self, name: str) -> bool:
            return name in self.running

        async def start_node(self, name: str, *, on_standby: bool = False) -> None:
            self.running = (name,)
            self.exits.put_nowait(Exit("decode-1", 18, SICK, ""))
            raise ClusterError(f"{name} is still running")

    said: asyncio.Queue[str] = asyncio.Queue()
    restarts = Restarts(StartedElsewhere(num_refused=0), said.put_nowait)
    running = asyncio.create_task(restarts.run())
    async with asyncio.timeout(30):
        told = [await said.get() for _ in range(2)]
    assert told[1].startswith("decode-1 (pid 18) ended"), "others are looked after"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_what_is_not_needed_any_more_is_not_started_again():
    class Retired(ClusterOfOne):
        async def start_node(self, name: str, *, on_standby: bool = False) -> None:
            raise AssertionError(f"{name} was retired")

        def is_retired(self, name: str) -> bool:
            if name == "decode-0":
                self.exits.put_nowait(Exit("decode-1", 18, SICK, ""))
            return True

    said: asyncio.Queue[str] = asyncio.Queue()
    running = asyncio.create_task(Restarts(Retired(num_refused=0), said.put_nowait).run())
    async with asyncio.timeout(30):
        told = [await said.get() for _ in range(2)]
    assert told[1].startswith("decode-1 (pid 18) ended"), "others are looked after"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
