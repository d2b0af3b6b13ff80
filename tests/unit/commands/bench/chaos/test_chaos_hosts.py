"""Hosts that lose each other: what does not arrive, what is as before, and what is left behind."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import cast

import aiohttp
import pytest

from pdserve.commands.bench.chaos.adapters import ChaosAdapters
from pdserve.commands.bench.chaos.config import ChaosConfig
from pdserve.commands.bench.chaos.faults import FaultTarget
from pdserve.commands.bench.chaos.hosts import Hosts, address, obstacle, own_hosts
from pdserve.commands.bench.chaos.measurement import ChaosReport
from pdserve.commands.bench.chaos.run import hosts_for
from pdserve.commands.bench.chaos.site import OnHosts, host_of
from pdserve.commands.cluster.child import Child
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.supervisor import Cluster
from pdserve.settings.config import CoordinatorConfig, NodeConfig
from pdserve.shared.errors import ClusterError
from tests.matrix import matrix

WHY_NOT = obstacle()
needs_hosts = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
PATIENCE_S = 0.1
ARRIVES_S = 20.0

Way = tuple[int, int]  # from a sender to a receiver


def network() -> int:
    """What this thread's network is known by."""
    return os.stat("/proc/thread-self/ns/net").st_ino


@contextmanager
def connection(
    hosts: Hosts, here: int, there: int
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection between two hosts."""
    with ExitStack() as stack:
        with hosts.entered(there):
            server = stack.enter_context(socket.create_server((address(there), 0)))
        with hosts.entered(here):
            near = stack.enter_context(socket.create_connection(server.getsockname(), ARRIVES_S))
        far, _ = server.accept()
        yield near, stack.enter_context(far)


def arrives(sender: socket.socket, receiver: socket.socket, within_s: float) -> bool:
    sender.sendall(b"x")
    receiver.settimeout(within_s)
    try:
        return receiver.recv(1) == b"x"
    except TimeoutError:
        return False


@needs_hosts
@pytest.mark.parametrize(("here", "there"), matrix([(1, 2), (2, 1), (0, 1), (1, 0)], 1))
def test_what_is_lost_in_one_direction_arrives_in_the_other(here: int, there: int) -> None:
    with own_hosts(3) as hosts, connection(hosts, here, there) as (near, far):
        assert arrives(near, far, ARRIVES_S)
        hosts.lose(here, there)
        assert not arrives(near, far, PATIENCE_S)
        assert arrives(far, near, ARRIVES_S), "and nothing has broken"
        hosts.find(here, there)
        far.settimeout(ARRIVES_S)
        assert far.recv(1) == b"x", "it is sent again"


@needs_hosts
def test_others_hear_a_host_that_one_has_lost() -> None:
    with own_hosts(3) as hosts, connection(hosts, 1, 0) as ends, connection(hosts, 2, 0) as others:
        hosts.lose(1, 2)
        hosts.lose(2, 1)
        assert arrives(*ends, ARRIVES_S)
        assert arrives(*others, ARRIVES_S)
        with hosts.entered(1), pytest.raises(TimeoutError):
            socket.create_connection((address(2), 1), PATIENCE_S)


@needs_hosts
def test_a_slow_host_sends_a_megabyte_a_second() -> None:
    with own_hosts(2) as hosts, connection(hosts, 1, 0) as (near, _):
        hosts.slow_down(1)
        near.settimeout(PATIENCE_S)
        with pytest.raises(TimeoutError):
            near.sendall(bytes(64 << 20))
        hosts.speed_up(1)


@needs_hosts
@pytest.mark.parametrize("ending", [None, KeyboardInterrupt, SystemExit, ClusterError])
def test_nothing_is_left_behind(ending: type[BaseException] | None) -> None:
    before, files = network(), sorted(os.listdir("/proc/self/fd"))
    try:
        with own_hosts(3) as hosts, hosts.entered(2):
            assert network() != before
            if ending is not None:
                raise ending
    except (KeyboardInterrupt, SystemExit, ClusterError):
        assert ending is not None
    assert network() == before
    assert sorted(os.listdir("/proc/self/fd")) == files


@needs_hosts
def test_what_cannot_be_made_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    before, files = network(), sorted(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("pdserve.commands.bench.chaos.hosts._CABLE", "no name of a device")
    with pytest.raises(ClusterError, match="no name of a device"), own_hosts(2):
        raise AssertionError("there is no host 1")
    assert network() == before
    assert sorted(os.listdir("/proc/self/fd")) == files


class FailingHosts(Hosts):
    """Four of them, between which some ways cannot be lost, others not be found."""

    def __init__(self, *, never_lost: Way | None = None, never_found: Way | None = None) -> None:
        super().__init__([-1] * 4)
        self.lost: set[Way] = set()
        self._never_lost, self._never_found = never_lost, never_found

    def lose(self, sender: int, receiver: int) -> None:
        if (sender, receiver) == self._never_lost:
            raise ClusterError("cannot be lost")
        self.lost.add((sender, receiver))

    def find(self, sender: int, receiver: int) -> None:
        if (sender, receiver) == self._never_found:
            raise ClusterError("cannot be found")
        self.lost.discard((sender, receiver))


WAYS: list[Way] = [(1, 2), (2, 1), (1, 3)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", ["lost", "found"])
async def test_ways_are_found_again_whatever_becomes_of_one(what: str, way: Way) -> None:
    hosts = FailingHosts(**{f"never_{what}": way})
    nobody = cast(Cluster, None), cast(aiohttp.ClientSession, None)  # neither is asked
    target = FaultTarget(
        nobody[0], {}, hosts, nobody[1], Random(0), cast(ChaosAdapters, None), lasts_s=0.0
    )
    with pytest.raises(ClusterError, match=f"cannot be {what}"):
        await target.parted(*WAYS)
    assert hosts.lost == ({way} if what == "found" else set())


def test_where_there_can_be_no_hosts_all_is_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda tool: None)
    report = ChaosReport(no_hosts=obstacle())
    assert report.no_hosts == "there is no command ip (iproute2)"
    with hosts_for(ChaosConfig(), report) as hosts:
        assert hosts is None


async def test_nodes_are_planned_on_hosts(tmp_path: Path) -> None:
    hosts = Hosts([-1, -1, -1])

    config = ClusterConfig(port=0, prefill=2, decode=3)
    site = OnHosts(config, Child, hosts, tmp_path / "token")
    try:
        coordinator, *nodes = await site.plan()
        assert isinstance(coordinator.config, CoordinatorConfig)
        assert coordinator.config.host == "127.0.0.1"
        assert coordinator.config.nodes_host == address(0)
        assert site.grpc_address == f"{address(0)}:{coordinator.config.grpc_port}"
        places = {}
        for plan in nodes:
            assert isinstance(plan.config, NodeConfig)
            assert plan.config.coordinators == [site.grpc_address]
            assert plan.config.security == coordinator.config.security
            places[plan.name] = plan.config.host
            assert plan.config.host == address(host_of(plan.name, hosts))
    finally:
        await site.release()
    assert places["prefill-0"] == places["decode-0"] == places["decode-2"] == address(1)
    assert places["prefill-1"] == places["decode-1"] == address(2)
