"""Reserves ports for child processes until they listen on them."""

from __future__ import annotations

import socket

from pdserve.shared.addresses import ANY_HOST, format_address, loopback, why_not_bound
from pdserve.shared.errors import ConfigError


class ReservedPort:
    """A port that is bound but not listened on, so that the kernel gives it to no other process.

    A server that sets SO_REUSEADDR (asyncio's and gRPC's do) can still listen on it. Until then,
    connections are refused as usual.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        """Reserve `port` of `host`, or any free one.

        Raises:
            ConfigError: the port is in use, or the address does not belong to this machine.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            address = format_address(host, port)
            raise ConfigError(f"cannot listen on {address}: {why_not_bound(error)}") from error
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Release the port; a server that listens on it already is not affected."""
        self._socket.close()


def reachable(host: str, port: int) -> str:
    """The `host:port` at which this machine reaches a server that listens on `host`."""
    return format_address(loopback(host) if host in ANY_HOST else host, port)
