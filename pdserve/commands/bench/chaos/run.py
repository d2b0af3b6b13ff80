"""`pdserve bench chaos`: a cluster, calls, faults, and a table of what came of them."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from aiohttp import ClientSession
from rich.table import Table

from pdserve.commands.bench.adapters.random_adapter import write_adapter
from pdserve.commands.bench.chaos import stopped_thread
from pdserve.commands.bench.chaos.adapters import ChaosAdapters
from pdserve.commands.bench.chaos.config import ChaosConfig
from pdserve.commands.bench.chaos.faults import (
    FAULTS,
    KILL_LOADING,
    NEEDS_HOSTS,
    NOT_IN,
    STOP_ENGINE,
    FaultTarget,
)
from pdserve.commands.bench.chaos.histories import HUNG, LOST, WRONG
from pdserve.commands.bench.chaos.hosts import Hosts, address, obstacle, own_hosts
from pdserve.commands.bench.chaos.measurement import Chaos, ChaosReport, session
from pdserve.commands.bench.chaos.relay import Relay
from pdserve.commands.bench.chaos.site import OnHosts
from pdserve.commands.bench.output import machine_and_date, print_json, print_tables, say
from pdserve.commands.cluster.child import Child
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.supervisor import Cluster
from pdserve.demo_model import CHECKPOINT_PATH
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.settings.answers import AnswerConfig
from pdserve.settings.config import ONE_POOL
from pdserve.shared.errors import ConfigError
from pdserve.shared.process.exit_codes import FAILED, OK

ADAPTERS: Final = ("adapter-a", "adapter-b")


class RelayedCluster(Cluster):
    """A cluster some of whose nodes reach the coordinator through a relay."""

    def __init__(self, config: ClusterConfig, relays: Mapping[str, Relay], **fields: Any) -> None:
        super().__init__(config, **fields)
        self._relays = relays

    def command_line(self, name: str) -> list[str]:
        """As Cluster.command_line, with another address of the coordinator."""
        words, relay = super().command_line(name), self._relays.get(name)
        if relay is None:
            return words
        flag = "--coordinators="
        return [word for word in words if not word.startswith(flag)] + [flag + relay.address]


def run(config: ChaosConfig, setup: dict[str, object]) -> int:
    """Run and print; the exit code is 1 if anything was lost, wrong, hung or leaked.

    Raises:
        ConfigError: a kind of faults is not known, or such nodes are not for the mode.
        ClusterError: the cluster failed without a fault, or does not come back.
    """
    report = ChaosReport(seed=config.seed, no_hosts=obstacle())
    if report.no_hosts:
        say(f"all nodes are on one host, and cannot be parted: {report.no_hosts}")
    if why := stopped_thread.obstacle():
        say(f"no engine is stopped: {why}")
    with hosts_for(config, report) as hosts:
        kinds = kinds_of(config, len(hosts or ()), {STOP_ENGINE} if why else ())
        asyncio.run(measure(config, kinds, report, hosts))
    if config.json:
        print_json(report, setup)
    else:
        print_tables([_table(report, machine_and_date(setup))], _remarks(report, config))
    return FAILED if report.complaints else OK


@contextmanager
def hosts_for(config: ChaosConfig, report: ChaosReport) -> Iterator[Hosts | None]:
    """Hosts for the nodes, meanwhile; None where there can be none."""
    if report.no_hosts:
        yield None
        return
    num_prefill = 0 if config.mode in ONE_POOL else config.prefill or 0
    with own_hosts(1 + max(num_prefill, config.decode)) as hosts:
        yield hosts


def kinds_of(config: ChaosConfig, num_hosts: int, impossible: Container[str] = ()) -> list[str]:
    """Return the kinds of faults to draw from.

    Raises:
        ConfigError: one is not known, or none can be made here.
    """
    for name in config.only:
        if name not in FAULTS:
            raise ConfigError(f'--only "{name}" is none of {", ".join(FAULTS)}')
    kinds = [
        name
        for name in config.only or FAULTS
        if name not in NOT_IN.get(config.mode, ())
        and num_hosts >= NEEDS_HOSTS.get(name, 0)
        and name not in impossible
    ]
    if not kinds:
        raise ConfigError(
            f"--only {','.join(config.only)}: not in mode {config.mode} with these nodes on this "
            "machine"
        )
    return kinds


def cluster_config(config: ChaosConfig, store: str) -> ClusterConfig:
    """Return that of the cluster, whose answers are stored in a file.

    Raises:
        ConfigError: such nodes are not for the mode.
    """
    try:
        return ClusterConfig(
            port=0,
            mode=config.mode,
            prefill=config.prefill if config.mode not in ONE_POOL else None,
            decode=config.decode,
            checkpoint=config.checkpoint,
            engine=config.engine,
            answers=AnswerConfig(store=store),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


async def measure(
    config: ChaosConfig,
    kinds: Sequence[str],
    report: ChaosReport,
    hosts: Hosts | None = None,
    make_child: type[Child] = Child,
) -> None:
    """Start a cluster, disturb it by these kinds of faults, and stop it. Raises as `run`.

    Its nodes are on `hosts`, of which this thread has to be on the first one.
    """
    relayed = [f"decode-{config.decode - 1}"]
    if config.mode not in ONE_POOL and config.prefill:
        relayed.append(f"prefill-{config.prefill - 1}")
    async with AsyncExitStack() as stack:
        cluster: RelayedCluster | None = None

        def coordinator() -> str:
            assert cluster is not None
            return cluster.grpc_address

        folder = stack.enter_context(TemporaryDirectory())
        here = "127.0.0.1" if hosts is None else address(0)
        relays = {
            name: await stack.enter_async_context(Relay(coordinator, here)) for name in relayed
        }
        disturbed = cluster_config(config, f"{folder}/answers")
        site: OnHosts | None = None
        if hosts is not None:
            site = OnHosts(disturbed, make_child, hosts, Path(folder, "token"))
        cluster = RelayedCluster(disturbed, relays, make_child=make_child, site=site)
        await stack.enter_async_context(cluster)
        client = await stack.enter_async_context(session())
        adapters = _adapters(disturbed, Path(folder), client, cluster.url)
        names = [(await cluster.status()).model, *adapters.folders]
        if why := await adapters.load_all():
            say(f"calls name no adapters: {why}")
            names, kinds = names[:1], [kind for kind in kinds if kind != KILL_LOADING]
        random = Random(f"targets {config.seed}")
        target = FaultTarget(cluster, relays, hosts, client, random, adapters)
        chaos = Chaos(target, names, config.mode, report, say)
        await chaos.run(kinds, config.faults, config.calls, config.pause_s)


def _adapters(
    config: ClusterConfig, folder: Path, client: ClientSession, url: str
) -> ChaosAdapters:
    """Write the adapters that calls name, for the cluster's model."""
    model = config.checkpoint.model or str(CHECKPOINT_PATH)
    checkpoint = resolve_checkpoint(model, config.checkpoint.revision)
    folders = {name: folder / name for name in ADAPTERS}
    for seed, path in enumerate(folders.values()):
        write_adapter(path, checkpoint, seed)
    return ChaosAdapters(client, url, folders, Random("adapters"))


def _table(report: ChaosReport, caption: str) -> Table:
    table = Table(title="faults, and the longest gaps of streams that ran", caption=caption)
    for column in ("fault", "times", "found ms p50/max", "gap ms p50/p99"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    for kind in FAULTS:
        faults = [fault for fault in report.faults if fault.kind == kind]
        if faults:
            found = [fault.found_s for fault in faults if fault.found_s is not None]
            gaps = report.gaps_s.get(kind, [])
            table.add_row(kind, str(len(faults)), _two(found, 100), _two(gaps, 99))
    return table


def _two(seconds: Sequence[float], high: int) -> str:
    if not seconds:
        return "-"
    return "/".join(f"{1e3 * np.percentile(seconds, q):.0f}" for q in (50, high))


def _remarks(report: ChaosReport, config: ChaosConfig) -> list[str]:
    counts = {kind: report.num(kind) for kind in (LOST, WRONG, HUNG)}
    said = (
        f"{len(report.faults)} faults, {len(report.calls)} calls in {report.lasted_s:.0f} s: "
        + ", ".join(f"{number} {kind}" for kind, number in counts.items())
        + f", {len(report.leaks)} leaks; {report.num_guessed} tokens had been guessed"
    )
    before, after = report.coordinator_mb
    memory = f"the coordinator's memory: {before:.0f} MB before, {after:.0f} MB after"
    if not report.complaints:
        return [said, memory, "nothing was lost"]
    again = f"again: pdserve bench chaos --seed {report.seed} --faults {config.faults}"
    again += f" --mode {config.mode} --decode {config.decode}"
    if config.prefill is not None:
        again += f" --prefill {config.prefill}"
    if config.only:
        again += f" --only {','.join(config.only)}"
    return [said, memory, *report.complaints, again]
