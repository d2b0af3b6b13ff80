"""What stands in the place of `pdserve.wire.channel`: channels and servers of a life's network."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from pdserve.shared.addresses import format_address
from tests.lives.loop import PROCESS
from tests.lives.network import Network
from tests.lives.streams import Connection


class Channel:
    """As a gRPC channel to one address, for one call."""

    def __init__(self, network: Network, address: str) -> None:
        self.calls: list[Connection] = []
        self._network = network
        self._address = address

    def stream_stream(self, path: str, **_: Any) -> Callable[[], Connection]:
        def call(**_: Any) -> Connection:
            connection = self._network.connect(self._address, path.rpartition("/")[2])
            self.calls.append(connection)
            return connection

        return call


@asynccontextmanager
async def open_channel(network: Network, address: str) -> AsyncIterator[Channel]:
    """As `pdserve.wire.channel.open_channel`."""
    channel = Channel(network, address)
    try:
        yield channel
    finally:
        for call in channel.calls:
            call.leave()


class Server:
    """As `pdserve.wire.channel.Server`; it listens where it is told to."""

    def __init__(self, network: Network) -> None:
        self.grpc = self  # methods are added to it
        self.is_serving = False
        self._network = network
        self._address = ""
        self._methods: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """They come as registered methods, too."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self._methods |= {name: handler.stream_stream for name, handler in handlers.items()}

    async def start(self, host: str, port: int) -> int:
        self._address = format_address(host, port)
        self._network.listen(self._address, self._methods)
        return port

    async def set_serving(self, serving: bool) -> None:
        self.is_serving = serving

    async def stop(self, grace_s: float) -> None:
        """End all calls; a life's servers give no grace, which is the harder case."""
        self._network.hush(self._address)
        process = PROCESS.get()
        assert process is not None
        self._network.end_calls_of(process)
