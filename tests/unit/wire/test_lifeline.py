"""What the kernel knows of a silent peer."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from pdserve.wire.lifeline import BUSY, STOPPED, Heard, Lifeline, called, caller, lifeline

LIMIT_S = 2.0
RECENT_S, LONG_AGO_S = 0.5 * LIMIT_S, 1.1 * LIMIT_S


@pytest.fixture(params=["127.0.0.1", "::1"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection, as gRPC has them: neither blocks."""
    with socket.create_server((request.param, 0), family=family_of(request.param)) as listening:
        ours = socket.create_connection(listening.getsockname()[:2])
        theirs, _ = listening.accept()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        yield ours, theirs


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def waited_s(heard: Heard | None) -> float:
    """For how long a peer of which this is known is waited for, in multiples of the limit."""
    line = Lifeline(LIMIT_S, lambda: heard)
    return max((n for n in range(1, 40) if line.holds((n - 0.5) * LIMIT_S)), default=0)


def test_who_answers_is_late_and_who_does_not_is_gone() -> None:
    assert waited_s(Heard(RECENT_S, RECENT_S)) == BUSY
    assert waited_s(Heard(RECENT_S, LONG_AGO_S)) == BUSY, "data may come without an acknowledgement"
    assert waited_s(Heard(LONG_AGO_S, RECENT_S)) == STOPPED
    assert waited_s(Heard(LONG_AGO_S, LONG_AGO_S)) == 0
    assert waited_s(None) == 1, "the kernel cannot tell"


def test_a_kernel_may_have_less_time_to_answer_than_its_process() -> None:
    line = Lifeline(LIMIT_S, lambda: Heard(LONG_AGO_S, RECENT_S), answers_s=0.9 * RECENT_S)
    assert not line.holds(RECENT_S)
    line = Lifeline(LIMIT_S, lambda: None, answers_s=0.9 * RECENT_S)
    assert line.holds(RECENT_S), "it cannot tell"


def test_it_says_what_is_known_of_the_host() -> None:
    for heard, told in (
        (Heard(LONG_AGO_S, LONG_AGO_S), ", nor did its host"),
        (Heard(LONG_AGO_S, RECENT_S), ", though its host did"),
        (None, ""),
    ):
        line = Lifeline(LIMIT_S, lambda heard=heard: heard)
        line.holds(LIMIT_S)
        assert line.of_its_host() == told


def test_a_connection_may_come_later() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        with lifeline(LIMIT_S, [address], is_opening=True) as line:
            assert not line.holds(LIMIT_S)
            with socket.create_connection(address):
                assert line.holds(LIMIT_S)
            assert not line.holds(LIMIT_S)


def test_a_connection_is_found_by_its_peer_and_left_as_it_was(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """The other end reads nothing and says nothing; its kernel is there."""
    ours, _ = pair
    num_open = len(os.listdir("/proc/self/fd"))
    with lifeline(LIMIT_S, [ours.getpeername()[:2]]) as line:
        assert line.holds(1.5 * LIMIT_S)
        assert len(os.listdir("/proc/self/fd")) == num_open + 1
        assert not ours.getblocking()
        assert not os.get_blocking(ours.fileno()), "gRPC would hang in a read"
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_of_a_peer_without_a_connection_nothing_is_known() -> None:
    for peers in ([], [("127.0.0.1", 1)], [("no address", 1)]):
        with lifeline(LIMIT_S, peers) as line:
            assert not line.holds(1.5 * LIMIT_S)


async def test_addresses() -> None:
    assert caller("ipv4:10.0.0.3:40112") == [("10.0.0.3", 40112)]
    assert caller("ipv6:%5B::1%5D:5") == [("::1", 5)]
    assert caller("unix:/tmp/socket") == []
    assert await called("[::1]:5") == [("::1", 5)]
    assert await called("no such name:5") == []
