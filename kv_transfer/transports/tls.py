"""TLS between two nodes: both show a node's certificate, and verify the other's.

The socket stays a socket: `sockets.py` and `span_io.py` use it as any other.
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kv_transfer.transports.sockets import wait_readable, wait_writable
from pdserve.shared.errors import AccessDenied
from pdserve.shared.process.certificates import (
    CA_FILE,
    CERT_FILE,
    KEY_FILE,
    Reloaded,
    mutual_context,
    role_name,
)

_NAME = role_name("node")
# On one connection: 2^24 records, which is less than AES-GCM may encrypt with one key (RFC 8446,
# 5.5), and OpenSSL does not change keys by itself.
MAX_BYTES = 2**38


@dataclass(frozen=True, slots=True)
class _Contexts:
    exporter: ssl.SSLContext
    puller: ssl.SSLContext


class NodeTls:
    """The TLS of a node. Connections that come after its files changed use the new ones."""

    def __init__(self, directory: Path) -> None:
        """`directory` has the certificate of the cluster's CA, the node's and its key.

        Raises:
            ConfigError: they cannot be used.
        """
        self._files = Reloaded(directory, (CA_FILE, CERT_FILE, KEY_FILE), _contexts)

    async def accept(self, sock: socket.socket) -> ssl.SSLSocket:
        """Agree on keys with a puller that has connected. `sock` is used up, whatever happens.

        Raises:
            AccessDenied: it has the certificate of another role.
            OSError: it shows no certificate that is trusted, or is no puller at all.
        """
        secured = self._files.latest().exporter.wrap_socket(
            sock, server_side=True, do_handshake_on_connect=False
        )
        try:
            await _shake_hands(secured)
            _check_role(secured)
        except BaseException:
            secured.close()
            raise
        return secured

    async def connect(self, sock: socket.socket) -> ssl.SSLSocket:
        """Agree on keys with the exporter that `sock` is connected to; it is used up.

        Raises:
            OSError: it shows no certificate of a node that is trusted, or speaks no TLS.
        """
        secured = self._files.latest().puller.wrap_socket(
            sock, server_hostname=_NAME, do_handshake_on_connect=False
        )
        try:
            await _shake_hands(secured)
        except BaseException:
            secured.close()
            raise
        return secured


async def _shake_hands(sock: ssl.SSLSocket) -> None:
    while True:
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            await wait_readable(sock)
        except ssl.SSLWantWriteError:
            await wait_writable(sock)
        except ssl.SSLEOFError as error:
            raise ConnectionResetError("the other end closed the connection") from error
        else:
            return


def _check_role(sock: ssl.SSLSocket) -> None:
    shown: Any = sock.getpeercert()
    names = [name for _, name in shown.get("subjectAltName", ())]
    if _NAME not in names:
        raise AccessDenied(
            f"the puller's certificate is for {', '.join(names) or 'nobody'}, not for {_NAME}"
        )


def _contexts(directory: Path) -> _Contexts:
    exporter = mutual_context(ssl.PROTOCOL_TLS_SERVER, directory)
    puller = mutual_context(ssl.PROTOCOL_TLS_CLIENT, directory)
    exporter.verify_mode = ssl.CERT_REQUIRED
    exporter.num_tickets = 0  # nothing but KV follows the handshake
    return _Contexts(exporter, puller)
