"""`pdserve calibrate`: measure, fit, write."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import aiohttp
from msgspec.structs import replace
from rich.table import Table

from pdserve.commands.bench.checkpoints.named import checkpoint_of
from pdserve.commands.bench.load.open_loop import open_loop_client
from pdserve.commands.bench.output import print_json, print_tables, say
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.plan import COORDINATOR
from pdserve.commands.cluster.readiness import wait_until
from pdserve.commands.cluster.status import fetch_status
from pdserve.commands.cluster.supervisor import Cluster
from pdserve.commands.simulation.calibrate.config import CalibrateConfig
from pdserve.commands.simulation.calibrate.drive import Driver
from pdserve.commands.simulation.calibrate.fit import Measured, calibrate
from pdserve.commands.simulation.calibrate.samples import READ_S, NodeReader
from pdserve.commands.simulation.calibrate.services import ServiceMeter
from pdserve.commands.simulation.predict.answer import said_errors
from pdserve.measured.calibration import Calibration, write_calibration
from pdserve.settings.config import CheckpointConfig, Mode
from pdserve.shared.errors import CalibrationError, ConfigError
from pdserve.shared.process.certificates import mutual_context
from pdserve.shared.process.exit_codes import OK

_WARM_UP_S = 2.0  # or a tenth of the time, if that is less
_GONE_S = 10.0  # until the coordinator has noticed that a node was stopped
# What is measured of clusters that are started for it: one node of each role; two of both, whose
# steps meet; and one of these, which mixes alone, on as few cores as beside the other.
_NUM_MEASURED: Final = 3
_LONG: Final = 0.5  # time for long contexts, over that for all else; two nodes of both have none


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
    """Measure the running cluster, or one after the other of those that are started."""
    if config.url:
        seconds = config.budget_s / (1 + _LONG)
        return await _at(config.url, config, seconds, None, {})
    seconds = config.budget_s / (_NUM_MEASURED + 2 * _LONG)
    async with _started(config, "disaggregated", config.engine.threads) as cluster:
        say(f"measuring a node of each role for {(1 + _LONG) * seconds:.0f} s")
        names = [COORDINATOR, *cluster.node_names]
        pids = {name: cluster.pid(name) for name in names}
        found = await _at(cluster.url, config, seconds, None, pids)
    async with _started(config, "colocated", found.kind.cpus) as cluster:
        pids = {COORDINATOR: cluster.pid(COORDINATOR)}
        for num_nodes in (2, 1):
            long = _LONG if num_nodes == 1 else 0.0
            say(f"measuring {num_nodes} of both roles for {(1 + long) * seconds:.0f} s")
            found = await _at(cluster.url, config, seconds, found, pids, long)
            if num_nodes == 2:
                await _without(cluster, cluster.node_names[-1])
    return found


@asynccontextmanager
async def _started(config: CalibrateConfig, mode: Mode, threads: int) -> AsyncIterator[Cluster]:
    """Two equal nodes on this machine, so that they share it as in service."""
    model = config.model or checkpoint_of(config.shape)
    cluster = Cluster(
        ClusterConfig(
            port=0,
            mode=mode,
            decode=2 if mode == "colocated" else 1,
            checkpoint=CheckpointConfig(model=model),
            engine=replace(config.engine, threads=threads),
        ),
        on_line=lambda _name, _line: None,
    )
    async with cluster as running:
        yield running


async def _without(cluster: Cluster, name: str) -> None:
    """Stop a node, and return when the coordinator knows it.

    Raises:
        ClusterError: it does not notice.
    """
    await cluster.retire_node(name)
    await wait_until(lambda status: status.node(name) is None, cluster.status, [], _GONE_S)


async def _at(
    url: str,
    config: CalibrateConfig,
    seconds: float,
    measured: Measured | None,
    pids: Mapping[str, int],
    long: float = _LONG,
) -> Measured:
    """Measure one cluster, half of the time for the fit and half to judge it.

    Args:
        seconds: time for all but long contexts.
        measured: of others; None: this is the first.
        pids: of its processes on this host, by name, whose work is measured; of nodes, those of one
            role each.
        long: time for long contexts, as a share of `seconds`.

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
    tls = mutual_context(ssl.PROTOCOL_TLS_CLIENT, Path(config.tls_dir)) if config.tls_dir else None
    async with aiohttp.ClientSession() as session, open_loop_client(url, status.model) as client:
        reader = NodeReader(session, addresses, tls)
        await reader.read()
        kind = reader.kind
        assert kind is not None
        measured = measured or Measured(kind)  # of clusters started later, memory may differ
        driver = Driver(client, kind.limits, kind.shape.block_size, config.seed)
        await driver.both(min(_WARM_UP_S, seconds / 10))
        await reader.read()
        idle = measured.handed_off if status.mode == "disaggregated" else measured.on_one_node
        meter = ServiceMeter(driver, reader, pids, measured.works)
        await meter.rest(seconds / 8)
        for recording in (measured.fitted, measured.held_out):
            each_s = seconds / 8
            found, read = await meter.during(driver.prompts(each_s), is_alone=True)
            idle += found
            recording.extend(read)
            # No windows of services: of a prompt, nodes have all but what is new.
            growing = driver.growing(long * seconds / 2)
            recording.extend((await reader.during(growing, READ_S))[1])
            recording.extend((await meter.during(driver.streams(each_s)))[1])
            # Their steps wait for what nodes do for requests, which is told apart by this.
            await meter.during(driver.answers(each_s))
            recording.extend((await meter.during(driver.both(each_s)))[1])
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
    overheads, services = calibration.overheads, calibration.services
    return "\n".join(
        [
            f"held-out errors: {said_errors(calibration.errors)}",
            f"ranges: prompts {ranges.prompt_tokens.least} to {ranges.prompt_tokens.most} tokens, "
            f"batches to {ranges.batch.most}, contexts to {ranges.context.most}",
            f"pulls by {pull.transport}: {1e3 * pull.fixed_s:.2f} ms and "
            f"{pull.bytes_per_s / 1e9:.2f} GB/s",
            f"on the way: {1e3 * overheads.first_token_s:.2f} ms to token 1, "
            f"{1e3 * overheads.handoff_s:.2f} ms more of a handoff",
            f"beside decodes of another node of the host: decode x {host.decode_beside_decode:g}, "
            f"prompts x {host.prompt_beside_decode:g}; beside its prompts: decode x "
            f"{host.decode_beside_prompt:g}, prompts x {host.prompt_beside_prompt:g}",
            *(
                f"{name}: {1e3 * of.request_s:.2f} ms of a core per request, "
                f"{1e6 * of.prompt_token_s:.2f} us per token of its prompt, "
                f"{1e3 * of.step_s:.2f} ms per step, {1e3 * of.token_s:.3f} ms per token"
                for name, of in (
                    ("coordinator", services.coordinator),
                    ("client", services.client),
                    ("prefill node, beside its steps", services.prefill),
                    ("decode node, beside its steps", services.decode),
                )
            ),
        ]
    )
