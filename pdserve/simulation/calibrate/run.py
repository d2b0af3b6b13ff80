"""`pdserve calibrate`: measure, fit, write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import aiohttp
from msgspec.structs import replace
from rich.table import Table

from pdserve.bench.checkpoints.named import checkpoint_of
from pdserve.bench.load.open_loop import open_loop_client
from pdserve.bench.output import print_json, print_tables, say
from pdserve.cluster.config import ClusterConfig
from pdserve.cluster.status import fetch_status
from pdserve.cluster.supervisor import Cluster
from pdserve.errors import CalibrationError, ConfigError
from pdserve.measured.calibration import Calibration, write_calibration
from pdserve.process.exit_codes import OK
from pdserve.settings.config import CheckpointConfig, Mode
from pdserve.simulation.calibrate.config import CalibrateConfig
from pdserve.simulation.calibrate.drive import Driver
from pdserve.simulation.calibrate.fit import Measured, calibrate
from pdserve.simulation.calibrate.samples import NodeReader
from pdserve.simulation.predict.answer import said_errors

_WARM_UP_S = 2.0  # or a tenth of the time, if that is less
# What is started: one node of each role; one of both, which mixes; two, whose decodes meet.
_STARTED: Final[Sequence[tuple[Mode, int]]] = (
    ("disaggregated", 2),
    ("colocated", 1),
    ("colocated", 2),
)


def run(config: CalibrateConfig, setup: dict[str, object]) -> int:
    """Calibrate, write the file, and print what it says; the exit code.

    Raises:
        PdserveError: there is nothing to measure, or it cannot be measured.
    """
    output = Path(config.output)
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no directory {output.parent}")
    calibration = measured(config)
    write_calibration(calibration, output)
    if config.json:
        print_json(calibration, setup)
    else:
        print_tables([_table(calibration)], [_card(calibration), f"written to {output}"])
    return OK


def measured(config: CalibrateConfig) -> Calibration:
    """Calibrate. Raises as `run`."""
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    return calibrate(asyncio.run(_measure(config)), date, config.seed)


async def _measure(config: CalibrateConfig) -> Measured:
    """Measure the running cluster, or one after the other of three that are started."""
    if config.url:
        return await _at(config.url, config, config.budget_s, None)
    found: Measured | None = None
    seconds = config.budget_s / len(_STARTED)
    for mode, num_nodes in _STARTED:
        threads = found.kind.cpus if found is not None else config.engine.threads
        async with _started(config, mode, num_nodes, threads) as url:
            say(f"measuring {num_nodes} nodes, {mode}, for {seconds:.0f} s")
            found = await _at(url, config, seconds, found)
    assert found is not None
    return found


@asynccontextmanager
async def _started(
    config: CalibrateConfig, mode: Mode, num_nodes: int, threads: int
) -> AsyncIterator[str]:
    """Equal nodes on this machine, so that they share it as in service."""
    model = config.model or checkpoint_of(config.shape)
    cluster = Cluster(
        ClusterConfig(
            port=0,
            mode=mode,
            decode=num_nodes if mode == "colocated" else 1,
            checkpoint=CheckpointConfig(model=model),
            engine=replace(config.engine, threads=threads),
        ),
        on_line=lambda _name, _line: None,
    )
    async with cluster as running:
        yield running.url


async def _at(
    url: str, config: CalibrateConfig, seconds: float, measured: Measured | None
) -> Measured:
    """Measure one cluster, half of the time for the fit and half to judge it.

    Raises:
        CalibrationError: somebody uses it, or its nodes cannot be asked, or share their cores.
    """
    status = await fetch_status(url)
    addresses = [node.metrics_address for node in status.nodes]
    if status.inflight or status.waiting:
        raise CalibrationError(f"{url} serves requests: calibrate a cluster that nobody uses")
    if status.mode == "multiplexed":
        raise CalibrationError(
            f"{url} is multiplexed, so the cores of a node change from step to step: calibrate a "
            "cluster of another mode, and simulate this one with that"
        )
    if not addresses:
        raise CalibrationError(f"{url} has no nodes")
    async with aiohttp.ClientSession() as session, open_loop_client(url, status.model) as client:
        reader = NodeReader(session, addresses)
        await reader.read()
        kind = reader.kind
        assert kind is not None
        measured = measured or Measured(kind)  # of clusters started later, memory may differ
        driver = Driver(client, kind.limits, kind.shape.block_size, config.seed)
        await driver.both(min(_WARM_UP_S, seconds / 10))
        await reader.read()
        idle = measured.handed_off if status.mode == "disaggregated" else measured.on_one_node
        for recording in (measured.fitted, measured.held_out):
            idle += await driver.prompts(seconds / 6)
            await driver.streams(seconds / 6)
            await driver.both(seconds / 6)
            recording.extend(await reader.read())
    measured.prompt_lengths |= driver.prompt_lengths
    measured.contexts |= driver.contexts
    return measured


def _table(calibration: Calibration) -> Table:
    table = Table(title=f"{calibration.device}, {calibration.model}, {calibration.cpus} threads")
    for column in ("steps", "error held out", "a token (ms)", "a full step (ms)"):
        table.add_column(column, justify="left" if column == "steps" else "right")
    errors, limits = calibration.errors, calibration.limits
    for region, costs, error in (
        ("prefill", calibration.prefill, errors.prefill),
        ("decode", calibration.decode, errors.decode),
        ("mixed", calibration.mixed, errors.mixed),
    ):
        table.add_row(
            region,
            "unknown" if error is None else f"{error:.1%}",
            f"{1e3 * costs.knot_s[0]:.2f}",
            f"{1e3 * costs.knot_s[-1]:.2f} at {costs.knot_tokens[-1]} of {limits.token_budget}",
        )
    return table


def _card(calibration: Calibration) -> str:
    ranges, pull, host = calibration.ranges, calibration.pull, calibration.host
    overheads = calibration.overheads
    return "\n".join(
        [
            f"held-out errors: {said_errors(calibration.errors)}",
            f"ranges: prompts {ranges.prompt_tokens.least} to {ranges.prompt_tokens.most} tokens, "
            f"batches to {ranges.batch.most}, contexts to {ranges.context.most}",
            f"pulls by {pull.transport}: {1e3 * pull.fixed_s:.2f} ms and "
            f"{pull.bytes_per_s / 1e9:.2f} GB/s",
            f"on the way: {1e3 * overheads.first_token_s:.2f} ms to token 1, "
            f"{1e3 * overheads.handoff_s:.2f} ms more of a handoff",
            f"beside another node of the host: decode x {host.decode_beside_decode:g} (its decode) "
            f"and x {host.decode_beside_prompt:g} (its prompts), prompts x "
            f"{host.prompt_beside_any:g}",
        ]
    )
