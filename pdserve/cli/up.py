"""`pdserve up`: runs a cluster in the foreground until Ctrl-C, and restarts what ends."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

from pdserve.cli.interruptible import finishes_before
from pdserve.cli.up_screen import UpScreen, invitation
from pdserve.cluster.autoscale import Autoscaler
from pdserve.cluster.child import Exit
from pdserve.cluster.config import ClusterConfig
from pdserve.cluster.restarts import Restarts
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
        if not await finishes_before(signals.drain, _start(cluster, screen, config)):
            return FORCED
        await finishes_before(signals.drain, _keep(cluster, screen))
        screen.say(f"stopping, for {config.timeouts.drain_s:g} s at most; Ctrl-C kills")
        ends: list[Exit] = []
        if not await finishes_before(signals.now, _stop(cluster, ends)):
            return FORCED
    finally:
        await cluster.kill()
    # One that has only just started does not hear of SIGTERM yet, and ends by it.
    bad_ends = [end for end in ends if end.returncode not in (0, -signal.SIGTERM)]
    for end in bad_ends:
        screen.say(end.told)
    return FAILED if bad_ends else OK


async def _keep(cluster: Cluster, screen: UpScreen) -> None:
    """Start again what ends, and as many nodes as load asks for."""
    async with asyncio.TaskGroup() as group:
        group.create_task(Restarts(cluster, screen.say).run())
        if cluster.config.scale is not None:
            group.create_task(Autoscaler(cluster, cluster.config.scale, screen.say).run())


async def _start(cluster: Cluster, screen: UpScreen, config: ClusterConfig) -> None:
    if config.on:
        screen.say(f"waiting for {config.on} to place the nodes, for {config.start_s:g} s at most")
    await cluster.spawn()
    if cluster.warning:
        screen.say(cluster.warning)
    with screen.loading(cluster.started_nodes) as bars:
        await cluster.wait_ready(bars.show)
    status = await cluster.status()
    print(invitation(cluster.url, status, has_page=config.access.page), flush=True)


async def _stop(cluster: Cluster, ends: list[Exit]) -> None:
    ends += await cluster.stop()
