"""What carries messages between processes: connections with delays, cuts and breaks.

It stands where gRPC's channels and servers do, so the links and sessions of both ends are the real
ones. Messages of one direction of a stream arrive in order, each after a delay of its own. A way
that is cut keeps what is sent until it is healed. If it is not healed for as long as keepalives
take, both ends find that the connection is broken; so they do at once where it is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass, field
from math import inf, nextafter
from random import Random
from typing import Any

from pdserve.wire.lifeline import Heard, Lifeline
from tests.lives.loop import PROCESS, Process, VirtualLoop
from tests.lives.streams import Connection, Ended, Pipe, unavailable
from tests.lives.trace import Trace

DELAY_S = (0.0002, 0.002)
NOBODY = Context()  # of what belongs to no process


@dataclass
class Way:
    """From one process to another."""

    is_cut: bool = False
    is_refused: bool = False  # a cut that both ends notice at once
    slowness: float = 1.0
    healed: asyncio.Event = field(default_factory=asyncio.Event)
    held: list[tuple[Pipe, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Listening:
    """A process that accepts calls at an address."""

    process: Process
    methods: dict[str, Callable[[Any, Any], Awaitable[None]]]


class Network:
    """All connections of a life."""

    def __init__(self, loop: VirtualLoop, random: Random, trace: Trace, keepalive_s: float) -> None:
        self.loop = loop
        self.random = random
        self.trace = trace
        self._keepalive_s = keepalive_s
        self._listening: dict[str, Listening] = {}
        self._ways: dict[tuple[Process, Process], Way] = {}
        self._connections: dict[Connection, None] = {}
        self._gone: dict[Process, bool] = {}  # |-> whether silently

    # ---- for processes -------------------------------------------------------------------------

    def listen(self, address: str, methods: dict[str, Any]) -> None:
        """Accept calls from now on."""
        process = PROCESS.get()
        assert process is not None
        self._listening[address] = Listening(process, methods)

    def hush(self, address: str) -> None:
        """Accept no more calls."""
        listening = self._listening.get(address)
        if listening is not None and listening.process is PROCESS.get():
            del self._listening[address]

    def connect(self, address: str, method: str) -> Connection:
        """Call a method; the connection may turn out to be refused."""
        client = PROCESS.get()
        assert client is not None
        listening = self._listening.get(address)
        server = listening.process if listening is not None else client
        connection = Connection(self, client, server)
        refused = Ended(unavailable(f"nobody listens at {address}"))
        if listening is None or self.way(client, server).is_refused:
            self.carry(connection.down, refused)
        else:
            self._connections[connection] = None
            connection.call(listening.methods[method])
        return connection

    def end_calls_of(self, server: Process) -> None:
        """End all calls that a server handles."""
        for connection in list(self._connections):
            if connection.server is server:
                connection.end()

    def forget(self, connection: Connection) -> None:
        """It has ended."""
        self._connections.pop(connection, None)

    def carry(self, pipe: Pipe, item: Any) -> None:
        """Bring an item to the other end of a pipe, after all those before it."""
        way = self.way(pipe.source, pipe.target)
        if way.is_cut:
            way.held.append((pipe, item))
            return
        arrival_s = self.loop.time() + self.delay_s(way)
        pipe.last_s = max(nextafter(pipe.last_s, inf), arrival_s)  # timers have no order else
        self.loop.call_at(pipe.last_s, pipe.arrive, item, context=NOBODY)

    def way(self, source: Process, target: Process) -> Way:
        """The way between two processes."""
        way = self._ways.get((source, target))
        if way is None:
            is_cut = self._gone.get(source, False) or self._gone.get(target, False)
            way = self._ways[source, target] = Way(is_cut)
        return way

    def delay_s(self, way: Way) -> float:
        """How long one message takes."""
        return self.random.uniform(*DELAY_S) * way.slowness

    def listener(self, address: str) -> list[Process]:
        """The process that accepts calls at an address."""
        return [self._listening[address].process] if address in self._listening else []

    @contextmanager
    def lifeline(
        self,
        limit_s: float,
        peers: Sequence[Process],
        answers_s: float = 0.0,
        *,
        is_opening: bool = False,
    ) -> Iterator[Lifeline]:
        """As `pdserve.wire.lifeline.lifeline`: the kernels know at once what is cut, or stopped."""
        here = PROCESS.get()
        assert here is not None

        def heard() -> Heard | None:
            for peer in peers:
                is_cut = self.way(here, peer).is_cut or self.way(peer, here).is_cut
                return Heard(inf if is_cut or peer.is_stopped else 0.0, inf if is_cut else 0.0)
            return None

        yield Lifeline(limit_s, heard, answers_s)

    # ---- what goes wrong -----------------------------------------------------------------------

    def cut(self, one: Process, other: Process, *, refuses: bool, both_ways: bool = True) -> None:
        """Carry nothing between them, until `heal`."""
        for source, target in [(one, other), (other, one)][: 2 if both_ways else 1]:
            way = self.way(source, target)
            way.is_cut, way.is_refused = True, refuses
            way.healed.clear()
        if refuses:
            self._break_between(one, other)
        else:
            self.loop.call_later(self._keepalive_s, self._break_if_cut, one, other, context=NOBODY)

    def heal(self, one: Process, other: Process) -> None:
        """Carry messages again, with what was held back."""
        for source, target in ((one, other), (other, one)):
            way = self.way(source, target)
            way.is_cut = way.is_refused = False
            way.slowness = 1.0
            way.healed.set()
            held, way.held = way.held, []
            for pipe, item in held:
                self.carry(pipe, item)

    def frozen(self, process: Process) -> None:
        """A process has been stopped: its peers give it up when their keepalives do."""
        self.loop.call_later(self._keepalive_s, self._break_if_stopped, process, context=NOBODY)

    def vanish(self, process: Process, *, silently: bool) -> None:
        """A process is gone; silently: with its host, which nobody says."""
        self._gone[process] = silently
        if silently:
            for pair in [(a, b) for a, b in self._ways if process in (a, b)]:
                self.cut(*pair, refuses=False)
            return
        for address, listening in list(self._listening.items()):
            if listening.process is process:
                del self._listening[address]
        for connection in list(self._connections):
            if process in (connection.client, connection.server):
                # What it has sent still arrives, or is thrown away with the connection.
                connection.break_for_peer_of(process, drops=self.random.random() < 0.5)

    def is_gone(self, process: Process) -> bool:
        """Whether it has vanished."""
        return process in self._gone

    def _break_between(self, one: Process, other: Process) -> None:
        for connection in list(self._connections):
            if {connection.client, connection.server} == {one, other}:
                connection.break_both()

    def _break_if_cut(self, one: Process, other: Process) -> None:
        if self.way(one, other).is_cut or self.way(other, one).is_cut:
            self._break_between(one, other)

    def _break_if_stopped(self, process: Process) -> None:
        if process.is_stopped:
            for connection in list(self._connections):
                if process in (connection.client, connection.server):
                    connection.break_both()
