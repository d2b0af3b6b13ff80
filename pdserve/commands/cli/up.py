"""`pdserve up`: runs a cluster in the foreground until Ctrl-C, and restarts what ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

from pdserve.commands.cli.starting.forked import Makes, begin_forking
from pdserve.commands.cli.starting.preflight import Say, check_cluster
from pdserve.commands.cli.starting.up_screen import LoadingBars, UpScreen, invitation
from pdserve.commands.cluster.autoscale import Autoscaler
from pdserve.commands.cluster.child import Child, Exit
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.placement import count_gpus, usable_cores
from pdserve.commands.cluster.plan import COORDINATOR, Machine
from pdserve.commands.cluster.restarts import Restarts
from pdserve.commands.cluster.supervisor import OWN_COMMAND, Cluster
from pdserve.model_files.gguf.model import forget_files
from pdserve.settings.access import API_KEY_VARIABLE
from pdserve.shared.process.collector import freeze_loaded_objects, pause_collector
from pdserve.shared.process.exit_codes import FAILED, FORCED, OK
from pdserve.shared.process.signals import StopSignals

Check = Callable[[ClusterConfig, Machine, Say], None]

_TELL_S: Final = 5.0  # between two lines about what is awaited


def run(
    config: ClusterConfig, command: Sequence[str] = OWN_COMMAND, check: Check = check_cluster
) -> int:
    """Start the cluster, serve, stop it; the exit code.

    Raises:
        PdserveError: the cluster would not start (`check`), or did not become ready.
    """
    pause_collector()
    screen = UpScreen()
    machine = Machine(usable_cores(config.engine.cpus), 0 if config.on else count_gpus())
    makes: Makes = (Child, None) if config.on else begin_forking(command)
    try:
        check(config, machine, screen.say)
        return asyncio.run(_up(config, command, screen, machine, makes))
    finally:
        screen.finish()


async def _up(
    config: ClusterConfig,
    command: Sequence[str],
    screen: UpScreen,
    machine: Machine,
    makes: Makes,
) -> int:
    make_child, before_nodes = makes
    cluster = Cluster(
        config,
        on_line=screen.line,
        command=command,
        make_child=make_child,
        machine=machine,
        restarts=True,
        before_nodes=before_nodes,
    )
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
    await wait_ready(cluster, screen)
    status = await cluster.status()
    access = config.access
    needs_key = bool(os.environ.get(API_KEY_VARIABLE) or access.key_file)
    screen.invite(invitation(cluster.url, status, has_page=access.page, needs_key=needs_key))
    forget_files()
    freeze_loaded_objects()


async def wait_ready(cluster: Cluster, screen: UpScreen) -> None:
    """Wait for the processes of a cluster, and say at once and then often what is awaited."""
    names = cluster.started_nodes
    screen.say(
        f"starting {COORDINATOR}, {', '.join(names)}, for {cluster.config.start_s:g} s at most"
    )
    with screen.loading(names) as bars:
        telling = asyncio.create_task(tell(bars, cluster.config.checkpoint.model))
        try:
            await cluster.wait_ready(bars.show)
        finally:
            telling.cancel()


async def tell(bars: LoadingBars, model: str, every_s: float = _TELL_S) -> None:
    """Say what is awaited, again and again."""
    while True:
        await asyncio.sleep(every_s)
        bars.tell(_downloaded_bytes(model))


def _downloaded_bytes(model: str) -> int:
    """Bytes of a model that nodes are downloading; 0: they are not, or it is not of the hub."""
    if not model or Path(model).expanduser().exists():
        return 0
    from pdserve.model_files.hub import downloaded_bytes

    return downloaded_bytes(model.partition(":")[0])


async def _stop(cluster: Cluster, ends: list[Exit]) -> None:
    ends += await cluster.stop()


async def finishes_before(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`, and cancel it if `event` is set first; whether it finished.

    Raises what `work` raises.
    """
    working = asyncio.create_task(work)
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        working.cancel()
        await asyncio.wait({working})
    if working.cancelled():
        return False
    working.result()
    return True
