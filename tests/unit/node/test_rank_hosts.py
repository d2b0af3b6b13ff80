"""What the hosts of a node send each other: blocks that a later one lacks, streams, shares."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.ranks.hosts import HostShare
from pdserve.engine.ranks.shard import Shard
from pdserve.engine.ranks.sizes import Parallelism
from pdserve.kv import KvDtype, KvLayout
from pdserve.node.rank_hosts.lacking import KnownBlocks, slots_of_step
from pdserve.node.rank_hosts.messages import HostAnswer, HostStep
from pdserve.node.rank_hosts.pool_view import PoolView
from pdserve.node.rank_hosts.stream import HostStream
from pdserve.node.start.model import check_host_stages
from pdserve.settings.config import EngineConfig
from pdserve.shared.errors import ConfigError, PeerLost
from tests.matrix import examples

BLOCK_SIZE, NUM_BLOCKS = 4, 6


@dataclass
class World:
    """A pool and the copy that a later host has of it; a token's KV is a number."""

    generations: np.ndarray = field(default_factory=lambda: np.zeros(NUM_BLOCKS, np.uint64))
    pool: np.ndarray = field(default_factory=lambda: np.zeros((NUM_BLOCKS, BLOCK_SIZE), np.int64))
    tables: list[list[int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    next_token: int = 1

    def __post_init__(self) -> None:
        self.known = KnownBlocks(self.generations, BLOCK_SIZE)
        self.copy = self.pool.copy()
        self.free = list(range(NUM_BLOCKS))

    def write(self, pool: np.ndarray, request: int, count: int) -> None:
        """Append tokens, with numbers of their own."""
        for position in range(self.lengths[request], self.lengths[request] + count):
            block = self.tables[request][position // BLOCK_SIZE]
            pool[block, position % BLOCK_SIZE] = self.next_token + position

    def has_room(self, request: int, count: int) -> bool:
        """Give the request blocks for more tokens, if there are any."""
        needed = -(-(self.lengths[request] + count) // BLOCK_SIZE) - len(self.tables[request])
        if needed > len(self.free):
            return False
        self.tables[request] += [self.free.pop() for _ in range(needed)]
        return True

    def pull(self, request: int, count: int) -> None:
        """KV comes from elsewhere: no step has computed it."""
        self.write(self.pool, request, count)
        self.lengths[request] += count

    def release(self, request: int) -> None:
        blocks = self.tables.pop(request)
        self.lengths.pop(request)
        self.generations[blocks] += np.uint64(1)
        self.free += blocks

    def step(self, counts: dict[int, int]) -> None:
        """Compute tokens of some requests on both hosts."""
        width = max(len(self.tables[r]) for r in counts)
        tables = np.zeros((len(counts), width), np.int32)
        for row, request in enumerate(counts):
            tables[row, : len(self.tables[request])] = self.tables[request]
        first = np.array([self.lengths[r] for r in counts])
        lacking = self.known.take_lacking(tables, first, first + list(counts.values()))
        self.copy[lacking] = self.pool[lacking]
        for request in counts:
            length, table = self.lengths[request], self.tables[request]
            assert (self.copy[table].ravel()[:length] == self.pool[table].ravel()[:length]).all()
        for request, count in counts.items():
            self.write(self.pool, request, count)
            self.write(self.copy, request, count)
            self.lengths[request] += count


ACTIONS = st.tuples(st.sampled_from("nprss"), st.integers(0, 5), st.integers(1, 5))


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(ACTIONS, max_size=60))
def test_a_later_host_has_the_context_of_every_step(actions: list[tuple[str, int, int]]) -> None:
    world = World()
    for action, number, count in actions:
        world.next_token += 1000
        requests = range(len(world.tables))
        if action == "n" and len(requests) < 3:
            world.tables.append([])
            world.lengths.append(0)
        elif action == "s":
            counts = {
                r: min(count, 1 + r) for r in requests if world.has_room(r, min(count, 1 + r))
            }
            if counts:
                world.step(counts)
        elif requests and action == "p" and world.has_room(number % len(requests), count):
            world.pull(number % len(requests), count)
        elif requests and action == "r":
            world.release(number % len(requests))


def test_what_both_hosts_have_computed_is_not_sent() -> None:
    world = World(tables=[[]], lengths=[0])
    for _ in range(20):
        assert world.has_room(0, 1)
        known = world.known
        table = np.array([world.tables[0]], np.int32)
        length = np.array([world.lengths[0]])
        assert len(known.take_lacking(table, length, length + 1)) == 0
        world.lengths[0] += 1


def test_rows_of_a_step_have_their_places() -> None:
    tables = np.array([[7, 3], [5, 0]], np.int32)
    ids, places = slots_of_step(tables, np.array([0, 3, 4]), np.array([6, 2]), BLOCK_SIZE)
    assert ids.tolist() == [7, 3, 3, 5]
    assert places.tolist() == [3, 0, 1, 1]


def test_tokens_and_blocks_of_later_layers_are_copied() -> None:
    layout = KvLayout(3, 2, 8, BLOCK_SIZE, KvDtype.BFLOAT16)
    later = msgspec.structs.replace(layout, num_layers=2)
    rng = np.random.default_rng(0)
    data = rng.integers(0, 255, (NUM_BLOCKS, layout.block_bytes), np.uint8)
    copy = np.zeros((NUM_BLOCKS, later.block_bytes), np.uint8)
    here, there = PoolView(data, layout, 1), PoolView(copy, later)
    ids, places = np.array([4, 1, 1]), np.array([0, 3, 2])
    tokens = here.tokens(ids, places)
    assert tokens.shape == there.empty_tokens(3).shape == (3, 2, 2, 2, 8)
    there.set_tokens(ids, places, tokens)
    assert (there.tokens(ids, places) == tokens).all()
    there.set_blocks(ids[:2], here.blocks(ids[:2]))
    assert [part.tolist() for part in here.few_at_once(ids)] == [[4, 1, 1]]
    whole = data.reshape(NUM_BLOCKS, 3, -1)[:, 1:]
    assert (copy.reshape(NUM_BLOCKS, 2, -1)[[4, 1]] == whole[[4, 1]]).all()
    assert not copy[[0, 2, 3, 5]].any()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        yield ours, theirs


def test_messages_and_arrays_arrive_and_an_end_is_told(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = (HostStream(sock) for sock in ends)
    numbers = np.arange(12.0).reshape(3, 4)
    ours.send(HostStep(3, 4), numbers[:, ::2], np.empty(0))
    assert theirs.receive(HostStep) == HostStep(3, 4)
    received = np.empty((3, 2))
    theirs.receive_array(received)
    assert (received == numbers[:, ::2]).all()
    assert theirs.is_silent(0.0)
    hung_up = threading.Thread(target=theirs.wait_hung_up)
    hung_up.start()
    ours.send(HostAnswer("no memory"))
    ours.close()
    hung_up.join(30.0)
    assert not hung_up.is_alive()
    with pytest.raises(PeerLost, match="no memory"):
        theirs.receive(HostAnswer).check()
    with pytest.raises(PeerLost, match="closed the connection"):
        theirs.receive(HostAnswer)


@pytest.mark.parametrize(
    ("sent", "said"),
    [(b"GET / HTTP/1.1", "not the other end"), (b"\0\0\0\1\xc1", "not the message")],
)
def test_what_is_no_message_is_refused(
    ends: tuple[socket.socket, socket.socket], sent: bytes, said: str
) -> None:
    ends[0].sendall(sent)
    with pytest.raises(PeerLost, match=said):
        HostStream(ends[1]).receive(HostStep)


def test_who_says_nothing_is_not_waited_for(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].sendall(b"\0")
    with pytest.raises(PeerLost, match="timed out"):
        HostStream(ends[1]).receive(HostStep, within_s=0.01)


def test_the_ranks_of_a_stage_are_shared_out_as_well() -> None:
    """As on GPUs."""
    first = HostShare(Parallelism(6, 1), 0, ("b:1", "c:1"))
    second, third = first.next(), first.next().next()
    assert [share.ranks for share in (first, second, third)] == [range(2), range(2, 4), range(4, 6)]
    assert first.shard(1) == Shard(1, 6)
    assert second.shard(1) == Shard(2, 6)
    assert third.shard(2) == Shard(5, 6)


def test_hosts_share_the_stages_and_stand_for_each_other() -> None:
    first = HostShare(Parallelism(2, 6), 0, ("b:1", "c:1"))
    second, third = first.next(), first.next().next()
    assert [share.stages for share in (first, second, third)] == [
        (2, 2, 1),
        (1, 2, 2, 1),
        (1, 2, 2),
    ]
    assert [share.num_ranks for share in (first, second, third)] == [4, 4, 4]
    assert first.shard(3) == Shard(1, 2, 1, 6)
    assert second.shard(1) == Shard(0, 2, 2, 6)
    assert third.shard(4) == Shard(1, 2, 5, 6)
    assert third.later_hosts == ()


def test_ranks_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(ValueError, match=r"pipeline_parallel 3 .* a multiple of the 2 hosts"):
        EngineConfig(pipeline_parallel=3, rank_hosts=["10.0.0.2:7100"])
    EngineConfig(tensor_parallel=2, pipeline_parallel=1, rank_hosts=["10.0.0.2:7100"])
    with pytest.raises(ConfigError, match="on CPUs it must be a multiple of the 2 hosts"):
        check_host_stages(HostShare(Parallelism(2, 1), 0, ("10.0.0.2:7100",)))
    with pytest.raises(ValueError, match="is not an address"):
        EngineConfig(pipeline_parallel=2, rank_hosts=["10.0.0.2"])
