"""How the ranks of a node meet, on one host or on several, once each has its weights."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from pdserve.engine.ranks.process_group import JOIN_S, GroupCollectives, join_ranks
from pdserve.engine.ranks.shard import Shard
from pdserve.node.device_ranks.order import Rendezvous
from pdserve.protocol import Sickness
from pdserve.shared.addresses import format_address, split_address
from pdserve.shared.errors import NodeSick
from pdserve.shared.process.may_pass import config_error

_WITHIN: Final = timedelta(seconds=JOIN_S)


@dataclass(frozen=True, slots=True)
class HostAddress:
    """A host, for the others of its node."""

    host: str  # to listen on
    reached: str  # where they reach it


HERE: Final = HostAddress("127.0.0.1", "127.0.0.1")


class StoreServer:
    """Rank 0's server, through which ranks on several hosts tell each other how they are reached.

    It is there for whoever reaches its port, in clear text: what it knows are addresses.
    """

    def __init__(self, at: HostAddress) -> None:
        """Listen on any free port; nobody is answered before `open`.

        Raises:
            ConfigError: the address cannot be bound.
        """
        family = socket.AF_INET6 if ":" in at.host else socket.AF_INET
        try:
            self._listener = socket.create_server((at.host, 0), family=family)
        except OSError as error:
            raise config_error(f"cannot listen on {at.host}: {error}", error) from error
        self._reached, self._port = at.reached, int(self._listener.getsockname()[1])
        self.address = format_address(self._reached, self._port)

    def open(self, num_ranks: int) -> Store:
        """Serve as long as what this returns is there. Once."""
        return TCPStore(
            self._reached,
            self._port,
            num_ranks,
            True,
            _WITHIN,
            wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
        )

    def close(self) -> None:
        """Stop listening, if it has not been opened."""
        self._listener.close()


def meet(
    place: Rendezvous,
    shard: Shard,
    device: torch.device,
    check: Callable[[], None],
    store: Store | None = None,
) -> GroupCollectives:
    """Meet the other ranks, all of which do the same once they have loaded their weights.

    Args:
        place: where.
        shard: this rank.
        device: its device.
        check: as join_ranks.
        store: of `place`, if this process has it open; None: it is opened.

    Raises:
        NodeSick: as join_ranks.
    """
    if store is None:
        store = _open_store(place)
    return join_ranks(store, shard, device, check, place.own_host)


def _open_store(place: Rendezvous) -> Store:
    if not place.store:  # the file has no name to clean up
        return FileStore(f"/proc/self/fd/{place.store_fd}", place.num_ranks)
    host, port = split_address(place.store)
    try:
        return TCPStore(host, port, place.num_ranks, False, _WITHIN, wait_for_workers=False)
    except RuntimeError as error:
        raise NodeSick(
            f"{Sickness.RANK_LOST}: rank 0 is not reached at {place.store}: {error}"
        ) from error
