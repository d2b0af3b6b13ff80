"""`pdserve bench transfer`: starts an exporter and a puller per block size, and measures pulls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from rich.table import Table

from kv_transfer.transports.catalog import KINDS
from pdserve.commands.bench.output import print_json, print_tables
from pdserve.commands.bench.transfer.config import NetworkName, TransferConfig
from pdserve.commands.bench.transfer.ends import layout_of
from pdserve.commands.bench.transfer.forms import FormReport, measure_forms, table_of
from pdserve.commands.bench.transfer.measurement import (
    PullCase,
    SkippedTransport,
    TransferReport,
    TransferRow,
    count_blocks,
    measure_transport,
)
from pdserve.commands.bench.transfer.network import NETWORKS
from pdserve.commands.bench.transfer.pools import CPU
from pdserve.commands.bench.transfer.processes import start_ends
from pdserve.engine.ranks.sizes import Parallelism
from pdserve.kv import KvLayout
from pdserve.shared.errors import ConfigError
from pdserve.shared.process.exit_codes import OK

_PULL_S = 60.0


def run(config: TransferConfig, setup: dict[str, object]) -> int:
    """Measure and print; the exit code.

    Raises:
        ConfigError: the settings leave nothing to measure.
        ClusterError: one of the processes has ended, or does not answer.
        CorruptTransfer: what arrived over a simulated link is not what was sent.
    """
    if (link := config.simulated_link) is not None:
        rows = asyncio.run(measure_forms(link))
        if config.json:
            print_json(FormReport(rows), setup)
        else:
            print_tables([table_of(rows, link)], [])
        return OK
    report = asyncio.run(measure(config))
    if config.json:
        print_json(report, setup)
    else:
        skipped = [f"{s.transport} over {s.network}: {s.reason}" for s in report.skipped]
        print_tables([_table(report.rows)], skipped)
    return OK


async def measure(config: TransferConfig) -> TransferReport:
    """Measure everything that the config asks for. Raises as `run`."""
    rows: list[TransferRow] = []
    skipped: list[SkippedTransport] = []
    transports: list[str] = [*config.transports] or [kind.name for kind in KINDS]
    cases = {name: list(_cases(config, name)) for name in config.networks}
    for name in config.networks:
        left = list(transports)
        obstacle = await NETWORKS[name].obstacle()
        if obstacle is not None:
            skipped += [SkippedTransport(transport, name, obstacle) for transport in left]
            continue
        for case in cases[name]:
            async with start_ends(case, NETWORKS[name], config.deadline_s) as ends:
                for transport in list(left):
                    found = await measure_transport(
                        ends.exporter, ends.puller, transport, case, ends.host
                    )
                    if isinstance(found, SkippedTransport):
                        skipped.append(found)
                        left.remove(transport)
                    else:
                        rows += found
    return TransferReport(rows, skipped)


def _cases(config: TransferConfig, network: NetworkName) -> Iterator[PullCase]:
    parallelism = Parallelism(config.tensor_parallel, config.pipeline_parallel)
    for block_bytes in config.block_sizes:
        _check_parts(layout_of(block_bytes), parallelism)  # raises here, not in a child
        pool_blocks, counts = count_blocks(config.counts, block_bytes, config.memory_bytes)
        yield PullCase(
            network,
            block_bytes,
            pool_blocks,
            counts,
            _PULL_S,
            not config.small_pages,
            config.both_devices,
            parallelism,
        )


def _check_parts(layout: KvLayout, parallelism: Parallelism) -> None:
    """Raises ConfigError: the heads or the layers of a block cannot be divided so."""
    if len(layout.heads) % parallelism.tensor:
        raise ConfigError(
            f"--tensor-parallel {parallelism.tensor}: blocks have {len(layout.heads)} heads: "
            "give 1, 2, 4 or 8"
        )
    if layout.num_layers < parallelism.pipeline:
        raise ConfigError(
            f"--pipeline-parallel {parallelism.pipeline}: blocks of {layout.block_bytes >> 10} KiB "
            f"have {layout.num_layers} layers: give larger ones by --block-kib, or fewer stages"
        )


def _table(rows: list[TransferRow]) -> Table:
    where = sorted({device for row in rows for device in row.devices} - {CPU})
    what = f"on {' and '.join(where)}, and a device copy" if where else "and memcpy"
    parts = f", in {rows[0].parts} parts" if rows and rows[0].parts > 1 else ""
    table = Table(title=f"pulls of scattered KV blocks{parts}, {what} of as many")
    table.add_column("transport")
    table.add_column("network")
    columns = ("block KiB", "blocks", "GB/s", "memcpy GB/s", "ratio", "us a pull", "CPU s/GB")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.transport,
            row.network,
            str(row.block_bytes >> 10),
            str(row.blocks),
            f"{row.gb_per_s:.2f}",
            f"{row.memcpy_gb_per_s:.2f}",
            f"{row.memcpy_ratio:.2f}",
            f"{row.pull_us:.0f}",
            f"{row.cpu_s_per_gb:.3f}",
        )
    return table
