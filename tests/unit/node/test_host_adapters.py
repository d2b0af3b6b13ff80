"""Adapters on their way to a later host: as they were sent, on all of its ranks, or on none."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field

import pytest
from msgspec import structs

from pdserve.node.rank_hosts import adapters as module
from pdserve.node.rank_hosts.adapters import HostAdapters, NextHost
from pdserve.node.rank_hosts.door import Door
from pdserve.node.rank_hosts.messages import SECRET_BYTES
from pdserve.node.rank_hosts.stream import HostStream
from pdserve.shared.errors import AdapterRefused, PeerLost
from tests.unit.node.test_door import WITHIN_S, order_of

SECRET = b"a" * SECRET_BYTES
CONTENT = os.urandom(1 << 20)


@dataclass
class Ranks:
    """Of the later host."""

    taken: dict[str, bytes] = field(default_factory=dict)
    refuses: str = ""
    may_answer: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_answer.set()

    def take(self, digest: str, fd: int) -> None:
        assert self.may_answer.wait(WITHIN_S)
        if self.refuses:
            raise AdapterRefused(self.refuses)
        self.taken[digest] = os.pread(fd, 1 << 30, 0)

    def drop(self, digest: str) -> None:
        self.taken.pop(digest, None)


@dataclass
class Hosts:
    """A node of two hosts: its stream of steps, the next host as it sees it, the ranks there."""

    stream: HostStream
    next: NextHost
    ranks: Ranks

    def take(self, digest: str) -> None:
        with open(os.memfd_create("sent"), "w+b") as file:
            file.write(CONTENT)
            file.flush()
            self.next.take(digest, file.fileno())


@contextmanager
def hosts_of(secret: bytes) -> Iterator[Hosts]:
    """`secret`: what the node says that it will show."""
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    order = structs.replace(order_of(), secret=secret)
    with ExitStack() as stack:
        door = stack.enter_context(closing(Door(listener, "", None)))
        stream = HostStream(socket.create_connection((host, port), WITHIN_S))
        stack.enter_context(closing(stream))
        stream.send(order)
        served, ranks = door.next_node(), Ranks()
        stack.enter_context(closing(served.stream))
        stack.enter_context(closing(HostAdapters(served, ranks)))
        next_host = stack.enter_context(closing(NextHost(f"{host}:{port}", "", SECRET)))
        yield Hosts(stream, next_host, ranks)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with hosts_of(SECRET) as hosts:
        yield hosts


def test_adapters_come_as_they_were_sent_and_go(hosts: Hosts) -> None:
    for digest in ("one", "two"):
        hosts.take(digest)
    assert hosts.ranks.taken == {"one": CONTENT, "two": CONTENT}
    hosts.next.drop("one")
    hosts.take("three")  # they follow each other
    assert sorted(hosts.ranks.taken) == ["three", "two"]


def test_what_ranks_refuse_is_said_and_the_next_one_is_taken(hosts: Hosts) -> None:
    hosts.ranks.refuses = "trained with another model"
    with pytest.raises(AdapterRefused, match=r"host 127\.0\.0\.1:.*trained with another model"):
        hosts.take("one")
    hosts.ranks.refuses = ""
    hosts.take("two")
    assert list(hosts.ranks.taken) == ["two"]


def test_other_bytes_than_those_that_were_sent_are_taken_by_none(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = iter([b"1" * 32, b"2" * 32])  # of what is sent, and of what comes
    monkeypatch.setattr(module, "_checksum", lambda _: next(sums))
    with pytest.raises(AdapterRefused, match="bytes of adapter one are not those that were sent"):
        hosts.take("one")
    assert not hosts.ranks.taken


def test_who_is_too_late_is_not_taken_for_the_next_one(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.ranks.may_answer.clear()
    with monkeypatch.context() as patch:
        patch.setattr(module, "TAKES_S", 0.0)
        with pytest.raises(AdapterRefused, match="it has not answered in 0 s"):
            hosts.take("one")
    hosts.ranks.refuses = "no room"
    hosts.ranks.may_answer.set()
    with pytest.raises(AdapterRefused, match="no room"):
        hosts.take("two")


def test_a_node_ends_with_its_connection_for_adapters(hosts: Hosts) -> None:
    hosts.take("one")
    hosts.next.close()
    assert not hosts.stream.is_silent(WITHIN_S), "its steps end"


def test_a_host_that_knows_nothing_of_adapters_refuses_them_and_computes_on() -> None:
    with hosts_of(b"") as hosts:
        with pytest.raises(PeerLost, match=r"host 127\.0\.0\.1:.* takes no adapters"):
            hosts.take("one")
        assert hosts.stream.is_silent(0.0)
