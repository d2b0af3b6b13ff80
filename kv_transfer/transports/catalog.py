"""The transports by name, as configuration and offers name them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_transfer.threads import CopyThreads
from kv_transfer.transports.interface import Source, Transport, TransportServer
from kv_transfer.transports.shm import ShmServer, ShmTransport
from kv_transfer.transports.tcp import TcpTransport
from kv_transfer.transports.tcp_server import TcpServer

ServerFactory = Callable[[Source], TransportServer]
TransportFactory = Callable[[CopyThreads], Transport]


@dataclass(frozen=True, slots=True)
class TransportKind:
    """Both ends of one transport."""

    server: ServerFactory
    client: TransportFactory


KINDS = {  # best first
    "shm": TransportKind(ShmServer, ShmTransport),
    "tcp": TransportKind(TcpServer, TcpTransport),
}


def kinds(names: Sequence[str]) -> list[TransportKind]:
    """The transports of these names, in this order."""
    return [KINDS[name] for name in names]
