"""HTTPS: a connection agrees on TLS before it becomes a client's `Connection`.

Until then it has a place and a deadline, too: who connects and is silent keeps nobody out.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import cast

from coordinator.api.server.places import Places
from pdserve.shared.errors import ConfigError
from pdserve.shared.process.certificates import CERT_FILE, KEY_FILE, Reloaded, tell_if_outdated

HANDSHAKE_S = 10.0  # in which client and server agree on keys
_QUIET_S = 10.0  # after a line about a client that did not, so that none can fill the log
_log = logging.getLogger(__name__)


class Https:
    """The TLS of one server. Connections that come after its files changed use the new ones."""

    def __init__(
        self,
        directory: Path,
        places: Places,
        make_protocol: Callable[[], asyncio.Protocol],
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        """`make_protocol` makes what speaks HTTP on a connection.

        Raises:
            ConfigError: there is no certificate and key in the directory that fit together.
        """
        self._contexts = Reloaded(directory, (CERT_FILE, KEY_FILE), https_context)
        self._places = places
        self._make_protocol = make_protocol
        self._handshake_s = handshake_s
        self._handshakes: dict[_Handshake, asyncio.Task[None]] = {}
        self._quiet_until_s = 0.0

    def accepted(self) -> asyncio.Protocol:
        """Return the protocol of a new TCP connection."""
        return _Handshake(self)

    def begin(self, handshake: _Handshake, transport: asyncio.Transport) -> None:
        """Let a connection agree on keys, if there is a place for it."""
        if not self._places.take(handshake, _address(transport)):
            transport.abort()
            return
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._shake_hands(handshake, transport))
        self._handshakes[handshake] = task
        # The task begins in the next turn of the loop, and TLS in the one after it.
        loop.call_soon(loop.call_soon, handshake.pass_on)
        task.add_done_callback(lambda _: self._handshakes.pop(handshake, None))

    def end(self, handshake: _Handshake) -> None:
        """A connection is lost, or turned away."""
        self._places.leave(handshake)
        if (task := self._handshakes.get(handshake)) is not None:
            task.cancel()

    def close(self) -> None:
        """End what has not become a client yet."""
        for task in self._handshakes.values():
            task.cancel()

    async def _shake_hands(self, handshake: _Handshake, transport: asyncio.Transport) -> None:
        secured = None
        transport.pause_reading()
        try:
            secured = await asyncio.get_running_loop().start_tls(
                transport,
                handshake,
                self._contexts.latest(),
                server_side=True,
                ssl_handshake_timeout=self._handshake_s,
            )
        except ssl.SSLError as error:  # no TLS, too old a version, or the client does not trust us
            self._tell(_address(transport), error)
        except OSError as error:  # it left, or was too slow
            _log.debug("a client at %s left: %s", _address(transport), error)
        finally:
            self._places.leave(handshake)
            if secured is None:
                transport.abort()
        if secured is not None:
            handshake.become(self._make_protocol(), secured)

    def _tell(self, address: str, error: ssl.SSLError) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + _QUIET_S
            _log.warning("no TLS with a client at %s: %s", address, error)


class _Handshake(asyncio.Protocol):
    """A connection that has not agreed on keys yet. A `Guest` as any other."""

    def __init__(self, https: Https) -> None:
        self._https = https
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] = []  # before TLS began; in one piece with the handshake's end

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)
        self._https.begin(self, self._transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """See asyncio.Protocol."""
        self._https.end(self)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._early.append(data)

    def pass_on(self) -> None:
        """Give TLS, which has just begun, what was read before: it is part of the handshake.

        That happens to clients which speak at once: uvloop reads when `connection_made` has
        returned, even if reading was paused there.
        """
        data, self._early = b"".join(self._early), []
        if self._transport is None or self._transport.is_closing():
            return
        tls = cast(asyncio.BufferedProtocol, self._transport.get_protocol())
        while data:
            buffer = memoryview(tls.get_buffer(len(data)))
            number = min(len(buffer), len(data))
            buffer[:number] = data[:number]
            tls.buffer_updated(number)
            data = data[number:]

    def turn_away(self) -> None:
        """Close the connection at once, for want of a place."""
        if self._transport is not None:
            self._transport.abort()
        self._https.end(self)

    def become(self, protocol: asyncio.Protocol, secured: asyncio.Transport) -> None:
        """Hand the connection over."""
        secured.set_protocol(protocol)
        protocol.connection_made(secured)
        for data in self._early:
            protocol.data_received(data)


def _address(transport: asyncio.Transport) -> str:
    return str((transport.get_extra_info("peername") or ("",))[0])


def https_context(directory: Path) -> ssl.SSLContext:
    """TLS with the certificate in a directory. Raises ConfigError: it cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:  # without a password it would ask for the one of an encrypted key at the terminal
        context.load_cert_chain(directory / CERT_FILE, directory / KEY_FILE, password="")
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"access.https_dir: {CERT_FILE} and {KEY_FILE} in {directory} are no certificate and "
            f"its unencrypted key: {error}"
        ) from error
    tell_if_outdated(directory)
    return context
