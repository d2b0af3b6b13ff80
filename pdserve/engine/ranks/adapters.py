"""Adapters of a node of several ranks: rank 0 hands what it takes to the others, beside steps.

There is a socket to each. An adapter goes as memory without a name, so that all have the same one,
whatever becomes of its files. No step has it before all ranks have taken it.
"""

from __future__ import annotations

import os
import socket
from typing import Final

from pdserve.engine.adapters.adapter import Adapter
from pdserve.engine.adapters.store import AdapterTaker
from pdserve.engine.ranks.adapter_bytes import from_file, to_bytes
from pdserve.shared.errors import AdapterRefused

TAKES_S: Final = 60.0  # a rank, to take an adapter
_MOST_BYTES: Final = 4096  # of a message
_TAKE, _DROP, _TAKEN = b"take", b"drop ", b"taken"


class OtherRanks:
    """The other ranks of this host, as rank 0 hands adapters to them: an AdapterTaker."""

    def __init__(self) -> None:
        self._ends: list[socket.socket] = []

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
            errors = []
            for end in self._ends:
                try:
                    socket.send_fds(end, [_TAKE], [file.fileno()])
                except OSError as error:
                    errors.append(str(error))
            answers = [_heard(end) for end in self._ends]
        errors += [answer for answer in answers if answer != _TAKEN.decode()]
        if errors:
            self.drop_adapter(adapter.digest)
            raise AdapterRefused(f"a rank has not taken adapter {adapter.digest}: {errors[0]}")

    def drop_adapter(self, digest: str) -> None:
        """Have all of them forget it. One that has ended has."""
        for end in self._ends:
            try:
                end.send(_DROP + digest.encode())
            except OSError:  # the node ends with it
                continue

    def close(self) -> None:
        """Close the sockets: nobody follows any more."""
        for end in self._ends:
            end.close()


class OtherHosts:
    """Ranks on other hosts, which take no adapters."""

    def take_adapter(self, adapter: Adapter) -> None:
        """Raise AdapterRefused."""
        raise AdapterRefused(
            f"adapter {adapter.digest} would be computed on several hosts: serve it on one"
        )

    def drop_adapter(self, digest: str) -> None:
        """They have none."""


def follow(orders: socket.socket, decoder: AdapterTaker) -> None:
    """Take and drop adapters as rank 0 says, until it ends. Runs in a thread beside the steps."""
    taken: set[str] = set()
    while True:
        message, fds, _, _ = socket.recv_fds(orders, _MOST_BYTES, 1)
        if message.startswith(_DROP):
            digest = message.removeprefix(_DROP).decode()
            if digest in taken:
                taken.discard(digest)
                decoder.drop_adapter(digest)
        elif fds:
            taken |= _take(orders, decoder, fds[0])
        else:
            return


def _take(orders: socket.socket, decoder: AdapterTaker, fd: int) -> set[str]:
    """Take one, and say so, or why not; returns its digest, if it is taken."""
    try:
        adapter = from_file(f"/proc/self/fd/{fd}")  # anew: all ranks have one place in it
        decoder.take_adapter(adapter)
    except Exception as error:  # noqa: BLE001  rank 0 is told
        orders.send(f"{type(error).__name__}: {error}".encode()[:_MOST_BYTES])
        return set()
    finally:
        os.close(fd)
    orders.send(_TAKEN)
    return {adapter.digest}


def _heard(end: socket.socket) -> str:
    try:
        return end.recv(_MOST_BYTES).decode(errors="replace") or "it has ended"
    except OSError as error:
        return str(error) or f"it has not answered in {TAKES_S:g} s"
