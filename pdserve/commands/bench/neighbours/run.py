"""`pdserve bench neighbours`: starts a cluster with two tenants; one is attacked by the other."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from coordinator.tenants.keys import new_key
from pdserve.commands.bench.compare.clusters import RunningServer, max_model_len
from pdserve.commands.bench.load.outcome import Percentiles
from pdserve.commands.bench.neighbours.attacks import ATTACKS
from pdserve.commands.bench.neighbours.config import NeighboursConfig
from pdserve.commands.bench.neighbours.measurement import (
    NeighboursReport,
    SharedCluster,
    measure_neighbours,
)
from pdserve.commands.bench.output import machine_and_date, print_json, print_tables, say
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.supervisor import Cluster
from pdserve.settings.access import AccessConfig, hash_key
from pdserve.shared.errors import ConfigError
from pdserve.shared.process.exit_codes import FAILED, OK


def run(config: NeighboursConfig, setup: dict[str, object]) -> int:
    """Measure and print; the exit code is 1 if the neighbour has reasons to complain.

    Raises:
        ConfigError: an attack is not known.
        ClusterError: the cluster failed.
    """
    for name in config.attack:
        if name not in ATTACKS:
            raise ConfigError(f'--attack "{name}" is none of {", ".join(ATTACKS)}')
    attacks = config.attack or list(ATTACKS)
    report = NeighboursReport()
    asyncio.run(_measure(config, attacks, report))
    complaints = report.complaints
    if config.json:
        print_json(report, setup)
    else:
        remarks = complaints or ["the neighbour has nothing to complain about"]
        print_tables([_table(report, machine_and_date(setup))], remarks)
    return FAILED if complaints else OK


async def _measure(
    config: NeighboursConfig, attacks: Sequence[str], report: NeighboursReport
) -> None:
    neighbour_key, attacker_key = new_key(), new_key()
    with tempfile.TemporaryDirectory() as folder:
        key_file = Path(folder) / "keys.toml"
        key_file.write_text(_tenant("neighbour", neighbour_key) + _tenant("attacker", attacker_key))
        cluster = ClusterConfig(
            port=0,
            mode=config.mode,
            prefill=config.prefill,
            decode=config.decode,
            checkpoint=config.checkpoint,
            engine=config.engine,
            access=AccessConfig(key_file=str(key_file)),
        )
        async with Cluster(cluster, on_line=_tell) as running:
            model = (await running.status()).model
            length = await max_model_len(running.url, model, neighbour_key)
            server = RunningServer(running, model, length)
            target = SharedCluster(
                running.url, model, length, neighbour_key, attacker_key, server.settle
            )
            await measure_neighbours(target, attacks, config.rate, config.round_s, report, say)


def _tenant(name: str, key: str) -> str:
    return f'[tenants.{name}]\nkeys = ["{hash_key(key)}"]\n'


def _tell(name: str, line: str) -> None:
    """Warnings of the processes are worth knowing: the cluster is under attack."""
    if "WARNING" in line or "ERROR" in line:
        say(f"{name}: {line}")


def _table(report: NeighboursReport, caption: str) -> Table:
    table = Table(title="the neighbour's calls; ms are p50/p99", caption=caption)
    table.add_column("beside")
    for column in ("calls", "not finished", "TTFT ms", "TPOT ms"):
        table.add_column(column, justify="right")
    table.add_column("what became of the other's calls")
    for row in report.rows:
        text = ATTACKS[row.other].text if row.other in ATTACKS else ""
        table.add_row(
            f"{row.other}: {text}" if text else row.other,
            str(row.calls),
            str(row.not_finished),
            _two(row.ttft_ms),
            _two(row.tpot_ms),
            ", ".join(f"{end}: {times}" for end, times in sorted(row.ends.items())),
        )
    return table


def _two(figures: Percentiles) -> str:
    return "/".join("-" if p is None else f"{p:.1f}" for p in (figures.p50, figures.p99))
