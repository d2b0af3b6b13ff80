"""Nodes of `pdserve up` are forked, and whoever looks at them need not know it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdserve.commands.cli.starting.forked import begin_forking
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.supervisor import OWN_COMMAND, Cluster
from pdserve.settings.access import API_KEY_VARIABLE
from pdserve.settings.config import ProfileConfig

SECRET = "of-clients"


@pytest.mark.long  # others would fail, too
async def test_forked_nodes_are_as_if_they_had_been_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, SECRET)
    make_child, before_nodes = begin_forking(OWN_COMMAND)
    config = ClusterConfig(port=0, profile=ProfileConfig(profile="off"))
    async with Cluster(config, make_child=make_child, before_nodes=before_nodes) as cluster:
        pids = {name: cluster.pid(name) for name in cluster.node_names}
        parents = {_parent(pid) for pid in pids.values()}
        assert len(parents) == 1, "one process has imported for all"
        assert os.getpid() not in parents
        for name, pid in pids.items():
            words = _read(pid, "cmdline").split("\0")
            assert words[:4] == [*OWN_COMMAND, name.split("-")[0]]
            assert f"--node-id={name}" in words
            assert SECRET not in _read(pid, "environ")
            assert os.getpgid(pid) == pid, "Ctrl-C is for `up` alone"
        end = await cluster.kill_node("decode-0")
        assert end.cause == "signal SIGKILL"
        await cluster.start_node("decode-0")
        assert [end.returncode for end in await cluster.stop()] == [0, 0, 0]


def _read(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text(errors="replace")


def _parent(pid: int) -> int:
    return int(_read(pid, "stat").rpartition(")")[2].split()[1])
