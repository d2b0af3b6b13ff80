"""Places for clients' connections: how many there are, and how many of them one client may take.

Where keys are needed, a connection is its address's until a request on it has a key, and then its
tenant's. An address with too many loses the one that has been without a key for longest, so who
holds connections and sends no key keeps nobody out, not even others behind the same address.
Without keys, clients are local, and only the total counts.
"""

from __future__ import annotations

import ipaddress
import logging
import math
from typing import Protocol

from pdserve.shared.errors import Overloaded

UNKNOWN_SHARE = 8  # an address's connections without a key are at most this part of all
TENANT_SHARE = 2  # and a tenant's this part
_IPV6_PREFIX = 64  # bits that name a site: it can choose the others
_log = logging.getLogger(__name__)


class Guest(Protocol):
    """A connection that holds a place."""

    def turn_away(self) -> None:
        """Close it at once."""
        ...


class Places:
    """The places of one server."""

    def __init__(self, num_places: int, *, need_keys: bool) -> None:
        self._num_places = num_places
        self._max_unknown = max(1, num_places // UNKNOWN_SHARE) if need_keys else math.inf
        self._max_known = max(1, num_places // TENANT_SHARE)
        self._owner_of: dict[Guest, str] = {}
        self._guests_of: dict[str, dict[Guest, None]] = {}  # by owner, in the order they came
        self._is_full = False

    def __len__(self) -> int:
        return len(self._owner_of)

    def take(self, guest: Guest, address: str) -> bool:
        """Take a place for a connection from this address; False if there is none."""
        owner = f"address {_site(address)}"
        unknown = self._guests_of.get(owner, {})
        if len(unknown) >= self._max_unknown:
            oldest = next(iter(unknown))
            self.leave(oldest)
            oldest.turn_away()
        was_full, self._is_full = self._is_full, len(self) >= self._num_places
        if self._is_full:
            if not was_full:
                _log.warning("there are %d connections: more are turned away", self._num_places)
            return False
        self._add(guest, owner)
        return True

    def identify(self, guest: Guest, tenant: str) -> None:
        """Note whose key a request on a connection has.

        Raises Overloaded if the tenant has too many connections; it stays its address's then.
        """
        owner = f"tenant {tenant}"
        if self._owner_of.get(guest, owner) == owner:
            return  # as ever, or it has been turned away already
        if len(self._guests_of.get(owner, {})) >= self._max_known:
            raise Overloaded(
                f"you have {self._max_known} connections, half of all that this server may have: "
                "use them again, or close some"
            )
        self.leave(guest)
        self._add(guest, owner)

    def leave(self, guest: Guest) -> None:
        """Give the place of a connection back, if it has one."""
        owner = self._owner_of.pop(guest, None)
        if owner is not None:
            del self._guests_of[owner][guest]
            if not self._guests_of[owner]:
                del self._guests_of[owner]

    def _add(self, guest: Guest, owner: str) -> None:
        self._owner_of[guest] = owner
        self._guests_of.setdefault(owner, {})[guest] = None


def _site(address: str) -> str:
    """Return what one client cannot change of its address."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if ip.version == 4:
        return address
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((ip, _IPV6_PREFIX), strict=False))
