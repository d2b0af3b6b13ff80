"""Adapters of a node of several ranks: rank 0 hands what it takes to the others, beside steps.

There is a socket to each. An adapter goes as memory without a name, so that all have the same one,
whatever becomes of its files. No step has it before all ranks have taken it.
"""

from __future__ import annotations

import os
import select
import socket
import time
from contextlib import suppress
from typing import Final, Protocol

from pdserve.engine.adapters.adapter import Adapter
from pdserve.engine.adapters.store import AdapterTaker
from pdserve.engine.ranks.adapter_bytes import from_file, to_bytes
from pdserve.shared.errors import AdapterRefused

TAKES_S: Final = 60.0  # a rank, to take an adapter
_MOST_BYTES: Final = 4096  # of a message
_TAKE, _DROP = "take", "drop"


class Follower(Protocol):
    """One rank, or several that are as one to whoever hands them adapters."""

    def take(self, digest: str, fd: int) -> None:
        """Take an adapter, all or nothing. What it raises is told to rank 0.

        Args:
            digest: the adapter's.
            fd: of a file with what `to_bytes` has made. It is left open.
        """
        ...

    def drop(self, digest: str) -> None:
        """Forget it, if it is here."""
        ...


class OtherRanks:
    """The other ranks of this host, as rank 0 hands adapters to them: AdapterTaker, Follower."""

    def __init__(self) -> None:
        self._ends: list[socket.socket] = []
        self._number = 0  # of the last take, which its answers have

    def connect(self) -> socket.socket:
        """Return the end of one more rank, for `follow`. Whoever starts it closes this one."""
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.settimeout(TAKES_S)
        self._ends.append(own)
        return theirs

    def take_adapter(self, adapter: Adapter) -> None:
        """Have all of them take it, or none.

        Raises:
            AdapterRefused: one cannot, or has ended.
        """
        with os.fdopen(os.memfd_create("pdserve-adapter"), "w+b") as file:
            file.write(to_bytes(adapter))
            file.flush()
            self.take(adapter.digest, file.fileno())

    def take(self, digest: str, fd: int) -> None:
        """See Follower. Raises AdapterRefused: one cannot, or has ended."""
        self._number += 1
        message, errors = f"{_TAKE} {self._number} {digest}".encode(), []
        for end in self._ends:
            try:
                socket.send_fds(end, [message], [fd])
            except OSError as error:
                errors.append(str(error))
        end_s = time.monotonic() + TAKES_S
        errors += filter(None, [_heard(end, self._number, end_s) for end in self._ends])
        if errors:
            self.drop(digest)
            raise AdapterRefused(f"a rank has not taken adapter {digest}: {errors[0]}")

    def drop_adapter(self, digest: str) -> None:
        """Have all of them forget it. One that has ended has."""
        self.drop(digest)

    def drop(self, digest: str) -> None:
        """See Follower."""
        for end in self._ends:
            with suppress(OSError):  # the node ends with it
                end.send(f"{_DROP} {digest}".encode())

    def close(self) -> None:
        """Close the sockets: nobody follows any more."""
        for end in self._ends:
            end.close()


class OwnDecoder:
    """The decoder of one rank: a Follower."""

    def __init__(self, decoder: AdapterTaker) -> None:
        self._decoder = decoder
        self._taken: set[str] = set()

    def take(self, digest: str, fd: int) -> None:
        """See Follower."""
        self._decoder.take_adapter(from_file(f"/proc/self/fd/{fd}"))  # anew: all share one place
        self._taken.add(digest)

    def drop(self, digest: str) -> None:
        """See Follower."""
        if digest in self._taken:
            self._taken.discard(digest)
            self._decoder.drop_adapter(digest)


def follow(orders: socket.socket, follower: Follower) -> None:
    """Take and drop adapters as rank 0 says, until it ends. Runs in a thread beside the steps."""
    while True:
        message, fds, _, _ = socket.recv_fds(orders, _MOST_BYTES, 1)
        what, _, rest = message.decode().partition(" ")
        if what == _DROP:
            follower.drop(rest)
        elif fds:
            number, _, digest = rest.partition(" ")
            orders.send(f"{number} {_take(follower, digest, fds[0])}".encode()[:_MOST_BYTES])
        else:
            return


def _take(follower: Follower, digest: str, fd: int) -> str:
    """Have an adapter taken; returns why it is not, or nothing."""
    try:
        follower.take(digest, fd)
    except Exception as error:  # noqa: BLE001  rank 0 is told
        return f"{type(error).__name__}: {error}"
    finally:
        os.close(fd)
    return ""


def _heard(end: socket.socket, number: int, end_s: float) -> str:
    """Wait for the answer to a take; returns why there is none, or nothing."""
    poll = select.poll()  # select has no room for high descriptors
    poll.register(end, select.POLLIN)
    while poll.poll(max(0.0, end_s - time.monotonic()) * 1000):
        try:
            answer = end.recv(_MOST_BYTES).decode(errors="replace")
        except OSError as error:
            return str(error)
        answered, _, why = answer.partition(" ")
        if not answer:
            return "it has ended"
        if answered == str(number):  # else it was too late with one before
            return why
    return f"it has not answered in {TAKES_S:g} s"
