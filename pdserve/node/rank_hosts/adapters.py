"""Adapters of a node over several hosts: each host hands what it takes to the next, beside steps.

They have a connection of their own, which is made for the first of them. A host has taken one when
all of its ranks have, and all hosts behind it. If that connection breaks, the node ends: nobody
knows any more who has what.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from concurrent.futures import CancelledError
from contextlib import suppress
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pdserve import _native
from pdserve.engine.ranks.adapters import TAKES_S, Follower
from pdserve.node.rank_hosts.connecting import connect
from pdserve.node.rank_hosts.door import ServedNode
from pdserve.node.rank_hosts.messages import AdapterAnswer, AdapterOrder
from pdserve.node.rank_hosts.stream import HostStream
from pdserve.shared.errors import AdapterRefused, PeerLost
from pdserve.shared.process.shared_memory import sealed_memory

log = logging.getLogger(__name__)

MOST_BYTES: Final = 64 << 30  # of an adapter


class NextHost:
    """The next host, as its carrier hands it adapters: a Follower."""

    def __init__(self, address: str, tls_dir: str, secret: bytes) -> None:
        """`secret` is what the node shows there (`HostOrder`)."""
        self._address = address
        self._tls_dir = tls_dir
        self._secret = secret
        self._stream: HostStream | None = None
        self._number = 0

    def take(self, digest: str, fd: int) -> None:
        """See Follower.

        Raises:
            AdapterRefused: a rank there cannot take it.
            PeerLost: the host cannot be reached, or knows nothing of adapters.
        """
        memory = _native.map_shared(fd, os.fstat(fd).st_size, writable=False)
        self._number += 1
        order = AdapterOrder(self._number, digest, memory.nbytes, _checksum(memory))
        try:
            stream = self._connected()
            stream.send(order, memory)
            error = self._answer(stream)
        except PeerLost as lost:
            self.close()
            raise PeerLost(f"host {self._address} takes no adapters: {lost}") from lost
        if error:
            raise AdapterRefused(f"host {self._address}: {error}")

    def drop(self, digest: str) -> None:
        """See Follower."""
        if self._stream is not None:
            self._number += 1
            with suppress(PeerLost):  # the node ends with it
                self._stream.send(AdapterOrder(self._number, digest))

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _connected(self) -> HostStream:
        if self._stream is None:
            self._stream = HostStream(asyncio.run(connect(self._address, self._tls_dir)))
            self._stream.send_array(np.frombuffer(self._secret, np.uint8))
        return self._stream

    def _answer(self, stream: HostStream) -> str:
        end_s = time.monotonic() + TAKES_S
        while not stream.is_silent(max(0.0, end_s - time.monotonic())):
            answer = stream.receive(AdapterAnswer, within_s=TAKES_S)
            if answer.number == self._number:  # else it was too late with one before
                return answer.error
        return f"it has not answered in {TAKES_S:g} s"


class HostAdapters:
    """Hands a later host's ranks what the host before says. A thread does, beside the steps."""

    def __init__(self, node: ServedNode, ranks: Follower) -> None:
        """Wait for the node's connection for adapters, and what comes of it.

        Args:
            node: which is served.
            ranks: all of this host.
        """
        self._node = node
        self._ranks = ranks
        self._thread = threading.Thread(target=self._run, name="host-adapters", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it: the node is not served any more, and its ranks here have ended."""
        second = self._node.second
        if not second.cancel():
            with suppress(OSError):  # it has ended already
                second.result().shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _run(self) -> None:
        try:
            stream = HostStream(self._node.second.result())
        except CancelledError:  # the node has ended without
            return
        try:
            while True:
                self._carry_out(stream.receive(AdapterOrder), stream)
        except (PeerLost, OSError) as error:
            log.info("the connection for adapters has ended: %s", error)
        finally:
            stream.close()
            self._node.stream.hang_up()

    def _carry_out(self, order: AdapterOrder, stream: HostStream) -> None:
        if not order.num_bytes:
            self._ranks.drop(order.digest)
            return
        if not 0 < order.num_bytes <= MOST_BYTES:
            raise PeerLost(f"an adapter of {order.num_bytes} bytes")
        fd, memory = sealed_memory("pdserve-adapter", order.num_bytes)
        try:
            stream.receive_array(memory)
            stream.send(AdapterAnswer(order.number, self._taken(order, fd, memory)))
        finally:
            os.close(fd)

    def _taken(self, order: AdapterOrder, fd: int, memory: NDArray[np.uint8]) -> str:
        """Have all ranks take it; returns why they have not, or nothing."""
        if _checksum(memory) != order.checksum:
            return f"the bytes of adapter {order.digest} are not those that were sent"
        try:
            self._ranks.take(order.digest, fd)
        except AdapterRefused as error:
            return error.message
        return ""


def _checksum(memory: NDArray[np.uint8]) -> bytes:
    return blake2b(memory.data, digest_size=32).digest()
