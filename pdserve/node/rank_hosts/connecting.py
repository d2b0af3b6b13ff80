"""Connects to a further host of a node, as soon as it listens."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kv_transfer.transports.tls import NodeTls
from pdserve.shared.addresses import split_address
from pdserve.shared.errors import PeerLost

CONNECT_S: Final = 60.0  # until the host must listen
_AGAIN_S: Final = 0.2


async def connect(
    address: str, tls_dir: str, on_wait: Callable[[], None] = lambda: None
) -> socket.socket:
    """Connect to it. `on_wait` is called now and then, and may raise.

    Raises:
        PeerLost: it does not listen within CONNECT_S, or shows no certificate that is trusted.
    """
    host, port = split_address(address)
    tls = NodeTls(Path(tls_dir)) if tls_dir else None
    end_s = time.monotonic() + CONNECT_S
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=CONNECT_S)
            if tls is not None:
                sock.setblocking(False)
                sock = await tls.connect(sock)
            return sock
        except OSError as error:
            if time.monotonic() > end_s:
                raise PeerLost(f"no pdserve rank at {address}: {error}") from error
            on_wait()
            await asyncio.sleep(_AGAIN_S)
