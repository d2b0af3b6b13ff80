import asyncio
import re
import signal
import time
from pathlib import Path

import pytest

from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.plan import Machine
from pdserve.commands.cluster.supervisor import Cluster
from pdserve.settings.access import API_KEY_VARIABLE
from pdserve.settings.config import CheckpointConfig
from pdserve.settings.timeouts import Timeouts
from pdserve.shared.errors import ClusterError, ConfigError
from pdserve.shared.process.exit_codes import StartFailed

ONE_CORE = Machine(cores=[0])


def config(model: str = "", **fields) -> ClusterConfig:
    defaults = {"port": 0, "start_s": 20.0, "timeouts": Timeouts(drain_s=5.0)}
    return ClusterConfig(checkpoint=CheckpointConfig(model=model), **{**defaults, **fields})


async def test_a_cluster_serves_until_it_is_left_and_leaves_nothing_behind(
    fake_command, monkeypatch
):
    """And only the coordinator inherits the API key."""
    monkeypatch.setenv(API_KEY_VARIABLE, "secret")

    def environment(name: str) -> bytes:
        return Path(f"/proc/{cluster.pid(name)}/environ").read_bytes()

    lines = []
    cluster = Cluster(
        config(decode=2),
        command=fake_command,
        machine=ONE_CORE,
        on_line=lambda name, line: lines.append((name, line)),
    )
    async with cluster:
        status = await cluster.status()
        assert {node.node_id for node in status.nodes} == {"prefill-0", "decode-0", "decode-1"}
        assert cluster.node_names == ["prefill-0", "decode-0", "decode-1"]
        assert all(node.state == "ready" for node in status.nodes)
        assert set(await cluster.metrics_addresses()) == set(cluster.node_names)
        assert ("coordinator", "the fake coordinator listens") in lines
        assert b"secret" in environment("coordinator")
        for name in cluster.node_names:
            assert b"PATH=" in environment(name)
            assert b"secret" not in environment(name)
    assert not any(cluster.is_running(name) for name in ["coordinator", *cluster.node_names])


@pytest.mark.long  # clusters that lose nodes show it by default
async def test_a_killed_node_comes_back_as_a_new_life(fake_command):
    async with Cluster(config(), command=fake_command, machine=ONE_CORE) as cluster:
        pid = cluster.pid("decode-0")
        end = await cluster.kill_node("decode-0")
        assert (end.pid, end.cause) == (pid, "signal SIGKILL")
        assert await cluster.next_exit() == end
        assert not cluster.is_running("decode-0")
        await cluster.start_node("decode-0")
        node = (await cluster.status()).node("decode-0")
        assert node is not None
        assert node.incarnation == str(cluster.pid("decode-0")) != str(pid)
        with pytest.raises(ClusterError, match="decode-0 is still running"):
            await cluster.start_node("decode-0")


def words_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.long
async def test_a_node_begins_on_standby_when_that_is_asked_for_and_only_then(fake_command):
    async with Cluster(config(), command=fake_command, machine=ONE_CORE) as cluster:
        for on_standby in (True, False):
            await cluster.kill_node("decode-0")
            await cluster.start_node("decode-0", on_standby=on_standby)
            assert (b"standby=true" in words_of(cluster.pid("decode-0"))) is on_standby
            assert cluster.begins_on_standby("decode-0") is on_standby


@pytest.mark.long  # clusters that lose it show it by default
async def test_nodes_attach_again_to_a_restarted_coordinator(fake_command):
    async with Cluster(config(mode="colocated"), command=fake_command, machine=ONE_CORE) as cluster:
        assert cluster.node_names == ["decode-0"]
        url = cluster.url
        await cluster.kill_node("coordinator")
        with pytest.raises(ClusterError, match="no coordinator at"):
            await cluster.status()
        await cluster.start_node("coordinator")
        await cluster.wait_ready()
        assert cluster.url == url
        assert (await cluster.status()).ready


async def test_a_child_that_cannot_start_ends_the_start_at_once_with_its_error(fake_command):
    cluster = Cluster(config("bad"), command=fake_command, machine=ONE_CORE)
    started_s = time.monotonic()
    with pytest.raises(
        StartFailed, match=r"ended with exit code 2 .*: no checkpoint at bad"
    ) as info:
        async with cluster:
            pytest.fail("it started")
    assert info.value.exit_code == 2
    assert time.monotonic() - started_s < 15
    assert not any(cluster.is_running(name) for name in ["coordinator", *cluster.node_names])


async def test_the_start_deadline_names_who_is_late(fake_command):
    for start_s in (2.0, 8.0, 32.0):  # on a busy machine the coordinator may be late itself
        cluster = Cluster(config("stuck", start_s=start_s), command=fake_command, machine=ONE_CORE)
        with pytest.raises(StartFailed, match=rf"within {start_s:g} s \(start_s\): ") as info:
            async with cluster:
                pytest.fail("it started")
        if "no coordinator at" not in str(info.value):
            break
    assert re.search(r"decode-0 \((loading|not)", str(info.value))


async def test_a_node_that_does_not_drain_is_killed_when_its_deadline_has_passed(fake_command):
    settings = config("deaf", mode="colocated", timeouts=Timeouts(drain_s=0.2))
    cluster = Cluster(settings, command=fake_command, machine=ONE_CORE, stop_margin_s=0.1)
    async with cluster:
        ends = await cluster.stop()
    assert [(end.name, end.cause) for end in ends] == [
        ("decode-0", "signal SIGKILL"),
        ("coordinator", "exit code 0"),
    ]


@pytest.mark.long
async def test_leaving_by_an_exception_kills_at_once(fake_command):
    settings = config("deaf", mode="colocated")
    cluster = Cluster(settings, command=fake_command, machine=ONE_CORE)
    with pytest.raises(ZeroDivisionError):
        async with cluster:
            1 / 0  # noqa: B018
    assert not cluster.is_running("decode-0")


@pytest.mark.long
async def test_a_signal_reaches_the_named_process_only(fake_command):
    async with Cluster(config(), command=fake_command, machine=ONE_CORE) as cluster:
        cluster.send_signal("prefill-0", signal.SIGTERM)
        end = await cluster.next_exit()
        assert (end.name, end.cause) == ("prefill-0", "exit code 0")
        assert cluster.is_running("decode-0")
        assert not (await cluster.status()).ready


async def test_a_taken_port_is_the_users_fault():
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
        await Cluster(config(port=port), machine=ONE_CORE).spawn()
    server.close()
    await server.wait_closed()
