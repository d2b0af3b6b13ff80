"""Addresses as text: `host:port`, or `[host]:port` where the host is an IPv6 address."""

from __future__ import annotations

import errno
import ipaddress
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

ANY_HOST = ("", "0.0.0.0", "::")  # to listen on: every address of this machine

_HOST = re.compile(r"[^\s\[\]:/,]+|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*")  # without a port
_ADDRESS = re.compile(r"(?:\[([^\s\[\]]+)\]|[^\s\[\]:/,]+):(\d{1,5})")

_NOT_BOUND: Final[Mapping[int | None, str]] = {
    errno.EADDRINUSE: "Address already in use: name another port, or 0 for any free one",
    errno.EADDRNOTAVAIL: "it is no address of this machine",
    errno.EACCES: "ports below 1024 are for root",
}


def format_address(host: str, port: int) -> str:
    """The address of a port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def why_not_bound(error: OSError) -> str:
    """What keeps a process from listening, and what would not."""
    return _NOT_BOUND.get(error.errno) or error.strerror or str(error)


def split_address(address: str) -> tuple[str, int]:
    """The host, without brackets, and the port of what `check_addresses` accepts."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def loopback(host: str) -> str:
    """The address of this machine that others cannot reach, of the same family as `host`."""
    return "::1" if ":" in host else "127.0.0.1"


@lru_cache(maxsize=256)  # every request asks about the few names that clients use
def is_loopback(host: str) -> bool:
    """Whether a name or IP address, without brackets or port, is of this machine itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def host_in(header: str) -> str:
    """The name or address in a Host header, without brackets or port; empty if there is none."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:  # a bracket is missing
        return ""


def check_addresses(addresses: Sequence[str]) -> None:
    """Check that each can be dialled, and that none occurs twice.

    Raises:
        ValueError: one cannot, or does.
    """
    for address in addresses:
        match = _ADDRESS.fullmatch(address)
        if match is None or not (_is_ipv6(match[1]) and 1 <= int(match[2]) <= 65535):
            raise ValueError(
                f'"{address}" is not an address: write it as "10.0.0.1:8001" or "[fd00::1]:8001"'
            )
        if addresses.count(address) > 1:
            raise ValueError(f'"{address}" is given twice')


def _is_ipv6(in_brackets: str | None) -> bool:
    """Whether an address has an IPv6 address in brackets, or none."""
    if in_brackets is None:
        return True
    try:
        ipaddress.IPv6Address(in_brackets)
    except ValueError:
        return False
    return True


def check_own_host(host: str, advertised: str) -> None:
    """Check that others can reach this process at what it tells them: `advertised`, else `host`.

    Raises:
        ValueError: it stands for every address of this machine, or is no host.
    """
    if advertised:
        if advertised in ANY_HOST or not _HOST.fullmatch(advertised):
            raise ValueError(
                f'`advertise` is "{advertised}": write a name or an address without a port, '
                "by which other nodes reach this one"
            )
    elif host in ANY_HOST:
        raise ValueError(
            f'`host` is "{host}", which is no address that other nodes can reach: name the one '
            "that this machine has in their network, as `host` or as `advertise`"
        )
