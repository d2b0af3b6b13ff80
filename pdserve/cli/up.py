"""`pdserve up`: runs a cluster in the foreground, until Ctrl-C."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pdserve.cli.interruptible import finishes_before
from pdserve.cli.up_screen import UpScreen, invitation
from pdserve.cluster.child import Exit
from pdserve.cluster.config import ClusterConfig
from pdserve.cluster.plan import COORDINATOR
from pdserve.cluster.supervisor import OWN_COMMAND, Cluster
from pdserve.process.exit_codes import FAILED, FORCED, OK
from pdserve.process.signals import StopSignals


def run(config: ClusterConfig, command: Sequence[str] = OWN_COMMAND) -> int:
    """Start the cluster, serve, stop it; the exit code.

    Raises:
        ConfigError: a port is in use, or the config contradicts itself.
        StartFailed: the cluster did not become ready.
    """
    return asyncio.run(_up(config, command))


async def _up(config: ClusterConfig, command: Sequence[str]) -> int:
    screen = UpScreen()
    cluster = Cluster(config, on_line=screen.line, command=command)
    signals = StopSignals()
    try:
        if not await finishes_before(signals.drain, _start(cluster, screen)):
            return FORCED
        asked = not await finishes_before(signals.drain, _watch(cluster, screen))
        screen.say(f"stopping, for {config.timeouts.drain_s:g} s at most; Ctrl-C kills")
        ends: list[Exit] = []
        if not await finishes_before(signals.now, _stop(cluster, ends)):
            return FORCED
    finally:
        await cluster.kill()
    bad_ends = [end for end in ends if end.returncode != 0]
    for end in bad_ends:
        screen.stopped(end)
    return OK if asked and not bad_ends else FAILED


async def _start(cluster: Cluster, screen: UpScreen) -> None:
    await cluster.spawn()
    if cluster.crowding:
        screen.say(cluster.crowding)
    with screen.loading(cluster.node_names) as bars:
        await cluster.wait_ready(bars.show)
    print(invitation(cluster.url, await cluster.status()), flush=True)


async def _watch(cluster: Cluster, screen: UpScreen) -> None:
    """Report each node that ends; return when the coordinator ends."""
    while True:
        end = await cluster.next_exit()
        if end.name == COORDINATOR:
            screen.say(f"{end.name} (pid {end.pid}) ended with {end.account}")
            return
        kind = end.name.rpartition("-")[0]
        others = [name for name in cluster.node_names if name.startswith(kind)]
        alive = sum(cluster.is_running(name) for name in others)
        screen.node_ended(end, cluster.command_line(end.name), alive)


async def _stop(cluster: Cluster, ends: list[Exit]) -> None:
    ends += await cluster.stop()
