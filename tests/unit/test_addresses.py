"""Addresses of processes: what can be dialled, and what is refused."""

from __future__ import annotations

import re

import pytest

from pdserve.settings.config import NodeConfig
from pdserve.settings.file import load_config
from pdserve.shared.addresses import check_addresses, check_own_host, format_address
from pdserve.shared.errors import ConfigError

SOUND = ["10.0.0.1:8001", "[::1]:1", "[fe80::1%eth0]:8001", "node-1.example.org:65535"]


def test_an_ipv6_host_is_put_in_brackets() -> None:
    assert format_address("10.0.0.1", 80) == "10.0.0.1:80"
    assert format_address("::1", 80) == "[::1]:80"


def test_sound_addresses_are_accepted() -> None:
    check_addresses(SOUND)
    for host in ("127.0.0.1", "::1", "node-1"):
        check_own_host(host, "")
        check_own_host("0.0.0.0", advertised=host)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host",
        ":8001",
        "host:",
        "host:0",
        "host:65536",
        "::1:80",
        "[::1]",
        "[10.0.0.1]:80",
        "[x]:1",
        "http://host:80",
    ],
)
def test_what_cannot_be_dialled_is_refused_with_an_example(address: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f'"{address}" is not an address: write it as')):
        check_addresses([*SOUND, address])


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"coordinators": ["host"]}, '"host" is not an address'),
        ({"coordinators": ["host:80", "host:80"]}, '"host:80" is given twice'),
        ({"host": "0.0.0.0"}, "no address that other nodes can reach"),
        ({"host": "::"}, "no address that other nodes can reach"),
        ({"advertise": "0.0.0.0"}, "write a name or an address without a port"),
        ({"advertise": "node-7:1"}, "write a name or an address without a port"),
    ],
)
def test_a_node_config_with_such_an_address_is_refused(
    values: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_config(NodeConfig, None, values)
