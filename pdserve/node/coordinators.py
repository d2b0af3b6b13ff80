"""A node's links to all of its coordinators, which are found by name.

One name may stand for many coordinators, such as a headless service of Kubernetes, and for others
as time goes by. So names, but not numbers, are looked up again and again: an address that is new
gets a link, and one that is gone loses it once its stream has ended. Two addresses may lead to one
coordinator, which refuses the second stream (`NodeHello.attached_to`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from pdserve.node.coordinator_link import CoordinatorLink
from pdserve.shared.addresses import format_address

log = logging.getLogger(__name__)

LOOK_UP_S: Final = 5.0  # how long name servers of clusters let an answer be kept


class Coordinators:
    """Keeps `links`, which the caller and others look at, in line with what names stand for."""

    def __init__(
        self,
        links: list[CoordinatorLink],
        addresses: Sequence[str],
        make_link: Callable[[str], CoordinatorLink],
        resolve: Callable[[str], Awaitable[list[str]]] | None = None,
        every_s: float = LOOK_UP_S,
    ) -> None:
        """
        Args:
            links: to fill; empty at first.
            addresses: host:port of every coordinator, or of several by one name.
            make_link: makes the link to one address.
            resolve: returns the addresses of a name; None: as the system does.
            every_s: how often names are looked up.
        """
        self._links = links
        self._addresses = addresses
        self._make_link = make_link
        self._resolve = resolve or look_up
        self._every_s = every_s
        self._running: dict[str, asyncio.Task[None]] = {}  # by address of a link
        self._failing: set[str] = set()  # names that could not be looked up the last time
        self._looking = asyncio.create_task(self._look_up_always())

    async def wait_drain_seen(self) -> None:
        """After DRAINING was reported: wait until no coordinator can send further legs."""
        for link in list(self._links):  # some may be dropped meanwhile
            await link.wait_drain_seen()

    async def leave(self) -> None:
        """Send what is queued, then close this node's ends of all streams."""
        self._looking.cancel()
        await asyncio.gather(*(link.leave() for link in self._links))

    async def wait_left(self, within_s: float) -> None:
        """After `leave`: wait until the coordinators have read it all; cut what takes longer."""
        if self._running:
            _, late = await asyncio.wait(self._running.values(), timeout=within_s)
            for task in late:
                task.cancel()

    async def _look_up_always(self) -> None:
        while True:
            known = True
            found: dict[str, None] = {}  # ordered
            for address in self._addresses:
                addresses = await self._look_up(address)
                known = known and bool(addresses)
                found |= dict.fromkeys(addresses)
            for address in found:
                self._add(address)
            if known:  # else a link may belong to the name that is not known now
                self._drop_others(found)
            if all(_is_numeric(address) for address in self._addresses):
                return  # each stands for itself
            await asyncio.sleep(self._every_s)

    async def _look_up(self, address: str) -> list[str]:
        """The addresses that a name stands for now; none if that is not known."""
        try:
            found = await self._resolve(address)
        except (OSError, UnicodeError) as error:
            if address not in self._failing:
                log.warning("coordinator %s cannot be looked up: %s", address, error)
                self._failing.add(address)
            return []
        self._failing.discard(address)
        return found

    def _add(self, address: str) -> None:
        if address not in self._running:
            link = self._make_link(address)
            self._links.append(link)
            self._running[address] = asyncio.create_task(link.run())

    def _drop_others(self, found: dict[str, None]) -> None:
        for link in [link for link in self._links if link.address not in found]:
            if not link.is_attached:  # a coordinator that drains has lost its name, but not us
                log.info("coordinator %s is no more behind its name", link.address)
                self._links.remove(link)
                self._running.pop(link.address).cancel()


async def look_up(address: str) -> list[str]:
    """The host:port of all machines that `host:port` stands for; a numeric address for itself.

    Raises:
        OSError, UnicodeError: nobody knows the name or can be asked, or it cannot be one.
    """
    if _is_numeric(address):
        return [address]
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    return list(dict.fromkeys(format_address(str(entry[4][0]), int(port)) for entry in found))


def _is_numeric(address: str) -> bool:
    host, _, _ = address.rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
