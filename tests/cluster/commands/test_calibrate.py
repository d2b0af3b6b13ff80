"""`pdserve calibrate` of a live cluster, and a simulation of that cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import msgspec
import pytest

from pdserve.commands.simulation.calibrate import run as calibrating
from pdserve.commands.simulation.calibrate.config import CalibrateConfig
from pdserve.commands.simulation.predict.answer import load_calibration
from pdserve.commands.simulation.simulate.config import SimulateConfig
from pdserve.commands.simulation.simulate.run import answer
from pdserve.measured.calibration import Services, read_calibration
from pdserve.measured.samples import NodeSamples
from pdserve.shared.errors import CalibrationError
from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import Client, Follower
from tests.cluster.fleet import Fleet, fleet_config, running


async def test_a_live_cluster_is_calibrated_and_simulated(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "node.json"
    async with running(Fleet(fleet_config(tiny_checkpoint))) as fleet:
        config = CalibrateConfig(url=fleet.url, output=str(file), budget_s=0.5, json=True)
        assert await asyncio.to_thread(calibrating.run, config, {}) == 0
    found = read_calibration(file)
    assert found.errors.prefill is not None
    assert found.errors.decode is not None
    assert found.pull.transport != "none"
    assert found.shape.layers == 2
    assert found.ranges.batch.most > 1
    assert found.believed is not None
    assert found.services == Services()  # the coordinator may be anywhere
    assert found.decode.knot_s[0] < found.prefill.knot_s[-1]
    simulated = SimulateConfig(
        calibration=str(file),
        requests=20,
        modes=["disaggregated"],
        rates=[1.0],
        ttft_s=100.0,
        tpot_s=100.0,
        extrapolate=True,
    )
    (mode,) = answer(simulated).modes
    assert mode.rows[0].score.finished == mode.rows[0].score.sent >= 20
    assert load_calibration(str(file)) == found


@pytest.mark.long
async def test_nodes_that_differ_are_not_calibrated_together(fleet: Fleet) -> None:
    with pytest.raises(CalibrationError, match="another kind of node than the others"):
        await asyncio.to_thread(calibrating.measured, CalibrateConfig(url=fleet.url))


@pytest.mark.long
async def test_a_cluster_that_is_used_is_not_calibrated(fleet: Fleet, client: Client) -> None:
    using = Follower(client, make_prompt(20, "used"), 20_000)
    await using.reached(1)
    with pytest.raises(CalibrationError, match="calibrate a cluster that nobody uses"):
        await asyncio.to_thread(calibrating.measured, CalibrateConfig(url=fleet.url))
    await using.hang_up()


@pytest.mark.long  # in one process they are by default
async def test_samples_are_told_once_and_in_order(fleet: Fleet, client: Client) -> None:
    await client.complete(make_prompt(100, "sampled"), 5)
    address = (await fleet.metrics_addresses())["prefill-0"]

    async def samples(after: int) -> NodeSamples:
        async with (
            aiohttp.ClientSession(raise_for_status=True) as session,
            session.get(f"http://{address}/samples", params={"after": after}) as response,
        ):
            return msgspec.json.decode(await response.read(), type=NodeSamples)

    newest = 0
    while (read := await samples(newest)).steps:
        assert [step.number for step in read.steps] == sorted(
            {step.number for step in read.steps if step.number > newest}
        )
        newest = read.newest
    await client.complete(make_prompt(100, "sampled again"), 5)
    new = (await samples(newest)).steps
    assert sum(step.tokens for step in new) == 100
    assert all(step.period_s > 0 for step in new)
