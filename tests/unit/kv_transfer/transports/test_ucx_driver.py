"""The thread that owns a UCX agent: slices, cancellation, and the agent that has to go."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator

import numpy as np
import numpy.typing as npt
import pytest

from kv_transfer.spans.plan import Spans
from kv_transfer.transports.ucx.agent import Descriptors, NothingPosted, Segment, UcxRegion
from kv_transfer.transports.ucx.driver import UcxDriver
from kv_transfer.transports.ucx.transfer import Peer, cut_slices
from pdserve.shared.errors import PeerLost, TransportUnavailable
from tests.matrix import matrix

POOL = UcxRegion(0, 1 << 40)
PEERS = UcxRegion(0, 1 << 40)
P0 = Peer("p0", 0)  # of the first agent
MANY = np.stack([np.arange(100), np.arange(100), np.ones(100)], axis=1).astype(np.int64) << 20


class FakeAgent:
    """Reads end when the test says so."""

    def __init__(self) -> None:
        self.has_late_writes = False
        self.regions: list[UcxRegion] = []
        self.peers: list[str] = []
        self.posted: list[tuple[str, int]] = []  # (peer, bytes)
        self.finishing = threading.Event()  # posted reads are done
        self.fail: Exception | None = None  # of every posted read
        self.failing: set[object] = set()  # of these, by number
        self.refuse: Exception | None = None  # to post one, or to register
        self.is_destroyed = False

    def register(self, region: UcxRegion) -> None:
        if self.refuse:
            raise self.refuse
        self.regions.append(region)

    def add_peer(self, metadata: bytes) -> str:
        self.peers.append(metadata.decode())
        return metadata.decode()

    def remove_peer(self, name: str) -> None:
        self.peers.remove(name)

    def post_read(
        self, peer: str, local: Descriptors, segment: Segment, remote: Descriptors, source: Segment
    ) -> object:
        assert (local[:, 1] == remote[:, 1]).all()
        if self.refuse:
            raise self.refuse
        self.posted.append((peer, int(local[:, 1].sum())))
        return len(self.posted) - 1

    def is_done(self, posted: object) -> bool:
        if posted in self.failing:
            raise PeerLost(f"slice {posted} broke")
        if self.fail:
            raise self.fail
        return self.finishing.is_set()

    def destroy(self) -> None:
        self.is_destroyed = True


class Agents:
    """Those that a driver has made."""

    def __init__(self) -> None:
        self.made: list[FakeAgent] = []

    def __call__(self) -> FakeAgent:
        self.made.append(FakeAgent())
        return self.made[-1]


@pytest.fixture
def agents() -> Agents:
    return Agents()


@pytest.fixture
async def driver(agents: Agents) -> AsyncIterator[UcxDriver]:
    made = UcxDriver(agents, POOL, quarantine_s=0.1)
    assert await made.connect("p0", b"p0") == P0
    yield made
    await made.close()


async def until_posted(agent: FakeAgent, count: int) -> None:
    async with asyncio.timeout(30):
        while len(agent.posted) < count:
            await asyncio.sleep(0)


# ---- slices ------------------------------------------------------------------------------------


def covered(spans: Spans) -> npt.NDArray[np.int64]:
    """Source and destination of each byte, in order."""
    places = [np.stack([s + np.arange(n), d + np.arange(n)]) for s, d, n in spans]
    joined = np.concatenate(places, axis=1)
    return joined[:, np.lexsort(joined[::-1])]


@pytest.mark.parametrize("slice_bytes", matrix([1 << 14, 1 << 15, 1 << 20], 1))
def test_slices_hold_the_same_bytes(slice_bytes: int) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.choice([1, 7, 512, 40_000], 40)
    starts = np.cumsum(lengths) - lengths
    spans = np.stack([starts, rng.permutation(40) * 50_000, lengths], axis=1).astype(np.int64)
    slices = cut_slices(spans, slice_bytes)
    assert all(0 < part[:, 2].sum() <= 2 * slice_bytes for part in slices)
    assert all((part[:, 2] > 0).all() for part in slices)
    joined = np.concatenate(slices)
    assert joined[:, 2].sum() == lengths.sum()
    assert (covered(joined) == covered(spans)).all()


def test_many_tiny_spans_make_slices_too() -> None:
    spans = np.stack([np.arange(10_000) * 2, np.arange(10_000), np.ones(10_000)], axis=1)
    assert len(cut_slices(spans.astype(np.int64))) > 5


# ---- transfers ---------------------------------------------------------------------------------


async def test_a_transfer_ends_with_its_last_slice(driver: UcxDriver, agents: Agents) -> None:
    (agent,) = agents.made
    task = asyncio.create_task(driver.transfer(P0, PEERS, POOL, MANY))
    await until_posted(agent, 2)
    assert not task.done()
    agent.finishing.set()
    await task
    assert sum(num_bytes for _, num_bytes in agent.posted) == 100 << 20


async def test_cancelling_posts_no_more_and_waits(driver: UcxDriver, agents: Agents) -> None:
    (agent,) = agents.made
    driver._thread._quarantine_s = 60
    task = asyncio.create_task(driver.transfer(P0, PEERS, POOL, MANY))
    await until_posted(agent, 2)
    task.cancel()
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done()
    posted = len(agent.posted)
    agent.finishing.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(agent.posted) == posted
    assert not agent.is_destroyed


async def test_what_never_ends_costs_the_agent(driver: UcxDriver, agents: Agents) -> None:
    (agent,) = agents.made
    p1 = await driver.connect("p1", b"p1")
    hung = asyncio.create_task(driver.transfer(P0, PEERS, POOL, MANY))
    other = asyncio.create_task(driver.transfer(p1, PEERS, POOL, MANY))
    await until_posted(agent, 4)
    hung.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hung
    with pytest.raises(PeerLost, match="'p0' did not end"):
        await other
    assert agent.is_destroyed
    # Channels of the former agent are told so; whoever connects next gets another one.
    with pytest.raises(PeerLost, match="not connected to 'p1' any more"):
        await driver.transfer(p1, PEERS, POOL, MANY)
    former, p1 = p1, await driver.connect("p1", b"p1")
    await driver.disconnect(former)  # which is not the new one's last channel
    assert agents.made[1].peers == ["p1"]
    assert agents.made[1].regions == [POOL]
    agents.made[1].finishing.set()
    await driver.transfer(p1, PEERS, POOL, MANY)


@pytest.mark.parametrize("has_late_writes", [False, True])
async def test_after_a_failure_nothing_writes_late(
    driver: UcxDriver, agents: Agents, has_late_writes: bool
) -> None:
    """With hardware that may still write, the agent goes before the failure is told."""
    (agent,) = agents.made
    agent.has_late_writes = has_late_writes
    agent.fail = PeerLost("the read broke")
    with pytest.raises(PeerLost, match="the read broke"):
        await driver.transfer(P0, PEERS, POOL, MANY)
    assert agent.is_destroyed == has_late_writes


async def test_the_other_slices_of_a_failed_transfer_are_waited_for(
    driver: UcxDriver, agents: Agents
) -> None:
    (agent,) = agents.made
    driver._thread._quarantine_s = 60
    task = asyncio.create_task(driver.transfer(P0, PEERS, POOL, MANY))
    await until_posted(agent, 2)
    agent.failing = {0}
    await asyncio.sleep(0.05)
    assert not task.done()
    agent.finishing.set()
    with pytest.raises(PeerLost, match="slice 0 broke"):
        await task
    assert len(agent.posted) == 2
    assert not agent.is_destroyed


async def test_a_slice_that_never_ends_after_a_failure_costs_the_agent(
    driver: UcxDriver, agents: Agents
) -> None:
    (agent,) = agents.made
    task = asyncio.create_task(driver.transfer(P0, PEERS, POOL, MANY))
    await until_posted(agent, 2)
    agent.failing = {0}
    with pytest.raises(PeerLost, match="slice 0 broke"):
        await task
    assert agent.is_destroyed


async def test_a_read_that_cannot_be_prepared_costs_only_itself(
    driver: UcxDriver, agents: Agents
) -> None:
    (agent,) = agents.made
    agent.has_late_writes = True
    agent.refuse = NothingPosted("no descriptors")
    with pytest.raises(PeerLost, match="no descriptors"):
        await driver.transfer(P0, PEERS, POOL, MANY)
    assert not agent.is_destroyed
    agent.refuse = None
    agent.finishing.set()
    await driver.transfer(P0, PEERS, POOL, MANY)


@pytest.mark.parametrize("where", ["fail", "refuse"])
@pytest.mark.parametrize("error", [TypeError("a bug"), MemoryError("no room")])
async def test_an_error_that_nobody_expected(
    driver: UcxDriver, agents: Agents, where: str, error: Exception
) -> None:
    """The transfer fails, its agent goes, and the thread lives."""
    (agent,) = agents.made
    setattr(agent, where, error)
    with pytest.raises(PeerLost, match=str(error)):
        await driver.transfer(P0, PEERS, POOL, MANY)
    assert agent.is_destroyed
    await assert_alive(driver, agents)


async def test_spans_that_cannot_be_cut(driver: UcxDriver, agents: Agents) -> None:
    with pytest.raises(PeerLost, match="unexpected"):
        await driver.transfer(P0, PEERS, POOL, np.empty((1, 0), dtype=np.int64))
    assert not agents.made[0].is_destroyed


async def test_a_command_that_fails_ends_neither_the_thread_nor_the_wait(
    driver: UcxDriver, agents: Agents
) -> None:
    task = asyncio.create_task(driver.transfer(P0, PEERS, POOL, MANY))
    await until_posted(agents.made[0], 2)
    driver._thread.command(lambda: [].pop())
    with pytest.raises(PeerLost, match="pop from empty list"):
        await task
    await assert_alive(driver, agents)


async def assert_alive(driver: UcxDriver, agents: Agents) -> None:
    """Another agent is made, and moves bytes."""
    peer = await driver.connect("p0", b"p0")
    agents.made[-1].finishing.set()
    await driver.transfer(peer, PEERS, POOL, MANY)


async def test_transfers_take_turns(driver: UcxDriver, agents: Agents) -> None:
    (agent,) = agents.made
    p1 = await driver.connect("p1", b"p1")
    long = np.tile(MANY, (20, 1))
    both = [asyncio.create_task(driver.transfer(peer, PEERS, POOL, long)) for peer in (P0, p1)]
    await until_posted(agent, 4)
    assert sorted(peer for peer, _ in agent.posted) == ["p0", "p0", "p1", "p1"]
    agent.finishing.set()
    await asyncio.gather(*both)
    halfway = [peer for peer, _ in agent.posted][: len(agent.posted) // 2]
    assert abs(halfway.count("p0") - halfway.count("p1")) <= 2


async def test_connecting_that_is_cancelled_leaves_nobody(agents: Agents) -> None:
    began, go_on = threading.Event(), threading.Event()

    def make_slowly() -> FakeAgent:
        began.set()
        assert go_on.wait(30)
        return agents()

    driver = UcxDriver(make_slowly, POOL)
    task = asyncio.create_task(driver.connect("p0", b"p0"))
    await asyncio.to_thread(began.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    await driver.connect("p1", b"p1")
    assert agents.made[0].peers == ["p1"]
    await driver.close()


# ---- peers and memory --------------------------------------------------------------------------


async def test_a_peer_lasts_as_long_as_its_channels(driver: UcxDriver, agents: Agents) -> None:
    (agent,) = agents.made
    await driver.connect("p0", b"p0")
    await driver.disconnect(P0)
    assert agent.peers == ["p0"]
    await driver.disconnect(P0)
    assert agent.peers == []


async def test_metadata_of_somebody_else(driver: UcxDriver, agents: Agents) -> None:
    with pytest.raises(PeerLost, match=r"of 'p2', not of 'p1'"):
        await driver.connect("p1", b"p2")
    assert agents.made[0].peers == ["p0"]


async def test_an_agent_that_cannot_be_made() -> None:
    def fail() -> FakeAgent:
        raise TransportUnavailable("no NIXL")

    driver = UcxDriver(fail, POOL)
    with pytest.raises(TransportUnavailable, match="no NIXL"):
        await driver.connect("p0", b"p0")
    await driver.close()


async def test_scratch_is_one_users_own_and_used_again(driver: UcxDriver, agents: Agents) -> None:
    async with driver.scratch(10) as first, driver.scratch(10) as second:
        assert not np.shares_memory(first, second)
    async with driver.scratch(20) as third:
        assert np.shares_memory(third, first) or np.shares_memory(third, second)
        assert len(third) == 20
    assert len(agents.made[0].regions) == 3  # the pool's and two pads


async def test_scratch_that_cannot_be_registered(driver: UcxDriver, agents: Agents) -> None:
    """So no pull is possible this way, and a link takes another one."""
    agents.made[0].refuse = TransportUnavailable("pinned memory is used up")
    with pytest.raises(PeerLost, match="pinned memory"):
        async with driver.scratch(10):
            raise AssertionError("there is none")


async def test_scratch_that_was_cancelled_keeps_what_was_registered(agents: Agents) -> None:
    """Or the next agent would register memory that is somebody else's by then."""
    driver = UcxDriver(agents, POOL)
    await driver.connect("p0", b"p0")
    began, go_on = threading.Event(), threading.Event()
    pads: list[weakref.ref[np.ndarray]] = []

    def register_slowly(pad: np.ndarray) -> None:
        began.set()
        assert go_on.wait(30)
        pads.append(weakref.ref(pad))
        register(pad)

    register, driver._thread.register = driver._thread.register, register_slowly

    async def use() -> None:
        async with driver.scratch(10):
            pass

    task = asyncio.create_task(use())
    await asyncio.to_thread(began.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    await driver.disconnect(P0)  # behind it
    del task
    gc.collect()
    assert len(agents.made[0].regions) == 2
    assert pads[0]() is not None
    await driver.close()
