"""A connection of two hosts of a node: messages, and arrays whose sizes both ends know."""

from __future__ import annotations

import select
import socket
import ssl
import struct
from contextlib import suppress
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kv_transfer.transports.sockets import keep_alive
from pdserve.shared.errors import PeerLost

M = TypeVar("M", bound=msgspec.Struct)

_LENGTH: Final = struct.Struct("!I")
_MOST_BYTES: Final = 1 << 20  # of a message


class HostStream:
    """One end. Blocking: for a process that does nothing else meanwhile."""

    def __init__(self, sock: socket.socket) -> None:
        """Use a connected socket, with TLS or without. It belongs to this from now on."""
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(sock)
        self._sock = sock

    @property
    def own_host(self) -> str:
        """The address of this end, without a port."""
        return str(self._sock.getsockname()[0])

    def send(self, message: msgspec.Struct, *arrays: NDArray[Any]) -> None:
        """Send a message, and arrays behind it.

        Raises:
            PeerLost: the connection broke.
        """
        encoded = msgspec.msgpack.encode(message)
        self._send(_LENGTH.pack(len(encoded)) + encoded)
        for array in arrays:
            self.send_array(array)

    def send_array(self, array: NDArray[Any]) -> None:
        """Send an array that the other end expects. Raises PeerLost."""
        if array.nbytes:
            self._send(np.ascontiguousarray(array).data.cast("B"))

    def receive(self, kind: type[M], within_s: float | None = None) -> M:
        """Wait for a message; each of its pieces must come within that time, if it is given.

        Raises:
            PeerLost: the connection broke, or this is no such message.
        """
        self._sock.settimeout(within_s)
        length = bytearray(_LENGTH.size)
        self._receive_into(memoryview(length))
        (num_bytes,) = _LENGTH.unpack(length)
        if num_bytes > _MOST_BYTES:
            raise PeerLost(f"a message of {num_bytes} bytes: not the other end of a rank's host")
        encoded = bytearray(num_bytes)
        self._receive_into(memoryview(encoded))
        self._sock.settimeout(None)
        try:
            return msgspec.msgpack.decode(encoded, type=kind)
        except msgspec.MsgspecError as error:
            raise PeerLost(f"not the message that is due: {error}") from error

    def receive_array(self, array: NDArray[Any]) -> None:
        """Fill a contiguous array with what the other end sends. Raises PeerLost."""
        if array.nbytes:
            self._receive_into(array.data.cast("B"))

    def is_silent(self, seconds: float) -> bool:
        """Whether nothing comes within this time: no message, and no end."""
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return False  # it has been read from the kernel already
        poll = select.poll()  # select has no room for high descriptors
        poll.register(self._sock, select.POLLIN)
        return not poll.poll(seconds * 1000)

    def wait_hung_up(self) -> None:
        """Wait until the other end has closed the connection, or it broke. For a thread."""
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLRDHUP)
        poll.poll()

    def close(self) -> None:
        """Close the connection; `wait_hung_up` returns."""
        self.hang_up()
        self._sock.close()

    def hang_up(self) -> None:
        """End the connection: whoever waits for the other end, in any thread, hears PeerLost."""
        with suppress(OSError):  # it is broken already
            self._sock.shutdown(socket.SHUT_RDWR)

    def _send(self, data: bytes | memoryview) -> None:
        try:
            self._sock.sendall(data)
        except OSError as error:
            raise PeerLost(f"the connection broke: {error}") from error

    def _receive_into(self, left: memoryview) -> None:
        try:
            while left:
                received = self._sock.recv_into(left)
                if not received:
                    raise PeerLost("the other end closed the connection")
                left = left[received:]
        except OSError as error:
            raise PeerLost(f"the connection broke: {error}") from error
