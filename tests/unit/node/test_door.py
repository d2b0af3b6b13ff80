"""Who is let in at a later host, who is told that it is taken, and whom strangers delay: nobody."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

import pytest

from pdserve.engine.ranks.hosts import HostShare
from pdserve.engine.ranks.sizes import Parallelism
from pdserve.engine.steps.worst import ANY_STEP
from pdserve.kv import KvDtype, KvLayout
from pdserve.node.device_hosts.messages import HostResult
from pdserve.node.rank_hosts import door as door_module
from pdserve.node.rank_hosts.door import MOST, Door, ServedNode
from pdserve.node.rank_hosts.messages import SECRET_BYTES, DevicesOrder, HostAnswer, HostOrder
from pdserve.node.rank_hosts.stream import HostStream
from pdserve.protocol.version import PROTOCOL
from pdserve.shared.errors import PeerLost

WITHIN_S = 30.0
SECRET = b"s" * SECRET_BYTES
DEVICES = DevicesOrder(
    kind="cuda",
    attention="auto",
    has_graphs=True,
    worst_step=ANY_STEP,
    store="10.0.0.1:7",
    advertised="10.0.0.2",
    secret=SECRET,
)


def order_of(devices: DevicesOrder | None = None, token: str = "") -> HostOrder:
    return HostOrder(
        protocol=PROTOCOL,
        token=token,
        model_id="m",
        revision="main",
        part=HostShare(Parallelism(1, 2), 0, ("10.0.0.2:7100",)),
        layout=KvLayout(2, 1, 8, 16, KvDtype.FLOAT32),
        num_blocks=4,
        quantization="none",
        kernels="",
        devices=devices,
    )


@dataclass
class Visited:
    """A door, and what comes to it."""

    door: Door
    address: tuple[str, int]

    def stranger(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=WITHIN_S)

    @contextmanager
    def node(self, order: HostOrder) -> Iterator[HostStream]:
        with closing(HostStream(self.stranger())) as stream:
            stream.send(order)
            yield stream

    @contextmanager
    def next_node(self) -> Iterator[ServedNode]:
        node = self.door.next_node()
        with closing(node.stream):
            yield node


@pytest.fixture
def visited() -> Iterator[Visited]:
    listener = socket.create_server(("127.0.0.1", 0))
    with closing(Door(listener, "", None)) as door:
        yield Visited(door, listener.getsockname())


@pytest.mark.parametrize(("devices", "answer"), [(None, HostAnswer), (DEVICES, HostResult)])
def test_a_host_that_serves_a_node_says_so_to_another(
    visited: Visited,
    monkeypatch: pytest.MonkeyPatch,
    devices: DevicesOrder | None,
    answer: type[HostAnswer] | type[HostResult],
) -> None:
    order = order_of(devices)
    with visited.node(order) as first, visited.next_node() as served:
        assert served.order == order
        monkeypatch.setattr(door_module, "FREE_S", 0.0)
        with visited.node(order) as second, pytest.raises(PeerLost, match="serves a node already"):
            second.receive(answer, WITHIN_S).check()
        served.stream.send(answer())
        first.receive(answer, WITHIN_S).check()


def test_a_node_that_comes_while_the_last_one_ends_is_let_in(visited: Visited) -> None:
    """As one that is started again does."""
    with (
        visited.node(order_of()),
        visited.next_node(),
        visited.node(order_of(DEVICES)) as again,
        visited.next_node() as served,
    ):
        assert served.order.devices == DEVICES
        served.stream.send(HostResult(7))
        assert again.receive(HostResult, WITHIN_S).num_states == 7


def test_a_node_with_another_token_is_told_so_at_once(visited: Visited) -> None:
    with (
        visited.node(order_of(token="x" * 16)) as node,
        pytest.raises(PeerLost, match="the join token is not the one here"),
    ):
        node.receive(HostAnswer, WITHIN_S).check()


def test_who_has_shown_the_token_is_not_pushed_out_by_strangers() -> None:
    token = "t" * 16
    listener = socket.create_server(("127.0.0.1", 0))
    with closing(Door(listener, token, None)) as door, ExitStack() as stack:
        visited = Visited(door, listener.getsockname())
        node = stack.enter_context(visited.node(order_of(DEVICES, token)))
        with visited.node(order_of()) as wrong, pytest.raises(PeerLost):  # so that one is known
            wrong.receive(HostAnswer, WITHIN_S).check()
        silent = [stack.enter_context(visited.stranger()) for _ in range(MOST + 1)]
        assert silent[0].recv(1) == b"", "the oldest stranger has made room"
        served = stack.enter_context(visited.next_node())
        served.stream.send(HostResult(7))
        assert node.receive(HostResult, WITHIN_S).num_states == 7


def test_strangers_do_not_delay_a_node_or_its_connection_for_kv(visited: Visited) -> None:
    """Who says nothing has ten seconds for it; there are only so many at a time."""
    with ExitStack() as stack:
        silent = [stack.enter_context(visited.stranger()) for _ in range(MOST)]
        stack.enter_context(visited.node(order_of(DEVICES)))
        served = stack.enter_context(visited.next_node())
        assert silent[0].recv(1) == b"", "the oldest one has made room"
        liar, node, late = (stack.enter_context(visited.stranger()) for _ in range(3))
        liar.sendall(b"x" * SECRET_BYTES)
        assert liar.recv(1) == b""
        node.sendall(SECRET)
        kv = stack.enter_context(served.second.result(WITHIN_S))
        kv.sendall(b"welcome")
        assert node.recv(7) == b"welcome"
        late.sendall(SECRET)
        assert late.recv(1) == b"", "there is one"


def test_the_connection_for_kv_of_a_node_that_has_ended_is_closed(visited: Visited) -> None:
    order = order_of(DEVICES)
    with visited.stranger() as node, visited.node(order), visited.next_node() as served:
        node.sendall(SECRET)
        served.second.result(WITHIN_S)
        with visited.node(order), visited.next_node() as following:
            assert not following.second.done()
        assert node.recv(1) == b""
