"""HTTPS: a connection agrees on TLS before it becomes a client's `Connection`.

Until then it has a place and a deadline, too: who connects and is silent keeps nobody out.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import cast

from coordinator.api.server.places import Places
from pdserve.errors import ConfigError
from pdserve.process.certificates import CERT_FILE, KEY_FILE, Reloaded

HANDSHAKE_S = 10.0  # in which client and server agree on keys


class Https:
    """The TLS of one server. Connections that come after its files changed use the new ones."""

    def __init__(
        self, directory: Path, places: Places, make_protocol: Callable[[], asyncio.Protocol]
    ) -> None:
        """`make_protocol` makes what speaks HTTP on a connection.

        Raises:
            ConfigError: there is no certificate and key in the directory that fit together.
        """
        self._contexts = Reloaded(directory, (CERT_FILE, KEY_FILE), _context)
        self._places = places
        self._make_protocol = make_protocol
        self._handshakes: set[asyncio.Task[None]] = set()

    def accepted(self) -> asyncio.Protocol:
        """Return the protocol of a new TCP connection."""
        return _Handshake(self)

    def begin(self, handshake: _Handshake, transport: asyncio.Transport) -> None:
        """Let a connection agree on keys, if there is a place for it."""
        peer = transport.get_extra_info("peername") or ("",)
        if not self._places.take(handshake, str(peer[0])):
            transport.abort()
            return
        task = asyncio.create_task(self._shake_hands(handshake, transport))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    def leave(self, handshake: _Handshake) -> None:
        """Give the place of a connection back."""
        self._places.leave(handshake)

    def close(self) -> None:
        """End what has not become a client yet."""
        for task in self._handshakes:
            task.cancel()

    async def _shake_hands(self, handshake: _Handshake, transport: asyncio.Transport) -> None:
        try:
            secured = await asyncio.get_running_loop().start_tls(
                transport,
                handshake,
                self._contexts.latest(),
                server_side=True,
                ssl_handshake_timeout=HANDSHAKE_S,
            )
        except OSError:  # no TLS, too old a version, a certificate that is not trusted, too late
            transport.abort()
            return
        except asyncio.CancelledError:
            transport.abort()
            raise
        finally:
            self.leave(handshake)
        handshake.become(self._make_protocol(), cast(asyncio.Transport, secured))


class _Handshake(asyncio.Protocol):
    """A connection that has not agreed on keys yet. A `Guest` as any other."""

    def __init__(self, https: Https) -> None:
        self._https = https
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] = []  # what came in one piece with the end of the handshake
        self._is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)
        self._https.begin(self, self._transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """See asyncio.Protocol."""
        self._is_lost = True
        self._https.leave(self)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._early.append(data)

    def turn_away(self) -> None:
        """See `Guest`."""
        if self._transport is not None:
            self._transport.abort()

    def become(self, protocol: asyncio.Protocol, secured: asyncio.Transport) -> None:
        """Hand the connection over, unless the client has left already."""
        if self._is_lost:
            return
        secured.set_protocol(protocol)
        protocol.connection_made(secured)
        for data in self._early:
            protocol.data_received(data)


def _context(directory: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:  # without a password it would ask for the one of an encrypted key at the terminal
        context.load_cert_chain(directory / CERT_FILE, directory / KEY_FILE, password="")
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"access.https_dir: {CERT_FILE} and {KEY_FILE} in {directory} are no certificate and "
            f"its unencrypted key: {error}"
        ) from error
    return context
