"""What the kernel knows of a peer that says nothing: a process that is late, or one that is gone.

A process is silent while its interpreter is busy, is stopped, or gets no time on its machine. Its
host's kernel acknowledges what arrives all the same, and while the process runs, gRPC's threads
answer pings, for which they need no interpreter. A host that is cut off does neither, and of a
process that has died the kernel closes the connection. So silence alone says little while the
connection under the stream is alive: such a peer is waited for, though not for ever.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple, TypeAlias
from urllib.parse import unquote

from pdserve.shared.addresses import split_address

log = logging.getLogger(__name__)

# A silent peer is given up after so many times the limit; sooner if its host does not answer.
STOPPED: Final = 2.0  # its process does not run
BUSY: Final = 15.0  # it runs, but its interpreter does not come round

_PROBE_S: Final = 1  # between two questions to the peer's kernel; it cannot be less
_TIMES: Final = struct.Struct("=52xII")  # tcp_info: milliseconds since the last data, and ack
_MS: Final = 1e-3

Endpoint: TypeAlias = tuple[str, int]  # an address of a machine, and a port


class Heard(NamedTuple):
    """How long ago a connection has brought something."""

    data_s: float  # from the peer's process
    ack_s: float  # from its kernel: an acknowledgement that did not come with data


class Lifeline:
    """Says whether a peer that has been silent is still waited for."""

    def __init__(
        self, limit_s: float, heard: Callable[[], Heard | None], answers_s: float = 0.0
    ) -> None:
        """
        Args:
            limit_s: of its silence, if nothing else is known.
            heard: asks the kernel; None: it cannot tell.
            answers_s: in which a kernel has acknowledged what it is sent; 0: as `limit_s`.
        """
        self._limit_s = limit_s
        self._heard = heard
        self._answers_s = answers_s or limit_s
        self._of_host = ""

    def holds(self, silent_s: float) -> bool:
        """Whether the peer is late rather than gone."""
        heard = self._heard()
        if heard is None:
            self._of_host = ""
            return silent_s < self._limit_s
        if min(heard) > self._answers_s:
            self._of_host = ", nor did its host"
            return False
        self._of_host = ", though its host did"
        factor = BUSY if heard.data_s <= self._limit_s else STOPPED
        return silent_s < factor * self._limit_s

    def of_its_host(self) -> str:
        """How "it did not answer" goes on, by the last look; empty if nothing is known."""
        return self._of_host


@contextmanager
def lifeline(
    limit_s: float, peers: Collection[Endpoint], answers_s: float = 0.0, *, is_opening: bool = False
) -> Iterator[Lifeline]:
    """The lifeline to a process that this one is connected to, at one of these addresses.

    With `is_opening`, it is about to be; then any connection to it will do, also an older one.
    """
    connections: list[socket.socket] = []

    def forget() -> None:
        while connections:
            connections.pop().close()

    def look() -> None:
        forget()
        connections.extend(_connections(peers))
        for connection in connections:
            _probe(connection)

    def heard() -> Heard | None:
        if is_opening:
            look()
        times = [_heard(connection) for connection in connections]
        known = [one for one in times if one is not None]
        if not known or len(known) < len(times):
            return None
        # By chance two peers may have one address and port: then it is the one of whom less is
        # heard.
        return min(known, key=min) if is_opening else max(known, key=min)

    look()
    try:
        yield Lifeline(limit_s, heard, answers_s)
    finally:
        forget()


def caller(grpc_peer: str) -> list[Endpoint]:
    """Who called, of "ipv4:10.0.0.3:40112"; nobody if it did not come over TCP."""
    kind, _, address = unquote(grpc_peer).partition(":")
    return [split_address(address)] if kind in ("ipv4", "ipv6") else []


async def called(address: str) -> list[Endpoint]:
    """Where `host:port` may have led; nowhere if nobody knows the name any more."""
    host, port = split_address(address)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [(str(entry[4][0]), port) for entry in found]


def _connections(peers: Collection[Endpoint]) -> list[socket.socket]:
    """Duplicates of this process's connections to them: gRPC does not show its own."""
    wanted = {(_plain(host), port) for host, port in peers}
    try:
        descriptors = [int(name) for name in os.listdir("/proc/self/fd")] if wanted else []
    except OSError:
        return []
    return [found for fd in descriptors if (found := _duplicate(fd, wanted)) is not None]


def _duplicate(fd: int, wanted: Collection[Endpoint]) -> socket.socket | None:
    try:
        looked_at = socket.socket(fileno=fd)
    except OSError:  # it is none, or was closed meanwhile
        return None
    try:
        is_tcp = looked_at.family in (socket.AF_INET, socket.AF_INET6)
        host, port, *_ = looked_at.getpeername() if is_tcp else ("", 0)
        # Not `looked_at.dup()`, which would make gRPC's own descriptor one that blocks.
        return socket.socket(fileno=os.dup(fd)) if (_plain(host), port) in wanted else None
    except OSError:  # it listens, or is not connected any more
        return None
    finally:
        looked_at.detach()


def _plain(host: str) -> str:
    """An address as text, in one form of several."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def _probe(connection: socket.socket) -> None:
    """Have the kernel ask the other one while nothing else is sent."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    except OSError as error:
        log.info("the kernel does not ask for a peer: %s", error)


def _heard(connection: socket.socket) -> Heard | None:
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TIMES.size)
    except OSError:
        return None
    if len(info) < _TIMES.size:
        return None
    data_ms, ack_ms = _TIMES.unpack(info)
    return Heard(data_ms * _MS, ack_ms * _MS)
