"""Multiplexed mode with real processes: a pair shares two cores, and survives its halves."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve import _native
from pdserve.errors import CalibrationError
from pdserve.node.split_cores.pair import LEASE_S
from pdserve.settings.config import NodeConfig
from pdserve.settings.values import format_cpus
from pdserve.simulation.calibrate import run as calibrating
from pdserve.simulation.calibrate.config import CalibrateConfig
from tests.cluster.checkpoints import Reference, make_prompt
from tests.cluster.client import Client, Follower
from tests.cluster.fleet import Fleet, fleet_config, poll, running

CORES = sorted(os.sched_getaffinity(0))[:2]
LENGTHS = (1, 15, 16, 38, 333, 1500)
NUM_OUTPUT = 12
STREAMED = 6000  # more than is waited for

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="one core cannot be split")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fleet(tiny_checkpoint: Path) -> AsyncIterator[Fleet]:
    engine = {"token_budget": 37, "max_model_len": 8192, "threads": 0, "cpus": format_cpus(CORES)}
    config = fleet_config(tiny_checkpoint, mode="multiplexed", engine=engine)
    async with running(Fleet(config)) as fleet:
        yield fleet


@pytest_asyncio.fixture(loop_scope="session")
async def client(fleet: Fleet) -> AsyncIterator[Client]:
    async with Client(fleet.url) as client:
        yield client
    await fleet.assert_baseline(within_s=20.0)


@pytest.fixture
def asked(fleet: Fleet) -> Iterator[dict[str, _native.CoreSplit]]:
    """Node |-> what reads how many cores it asks for, as the other one does."""
    config = fleet._plans["decode-0"].config
    assert isinstance(config, NodeConfig)
    fd = os.open(config.shared_cores, os.O_RDWR)
    yield {
        "decode-0": _native.CoreSplit(fd, True, 2, LEASE_S),
        "prefill-0": _native.CoreSplit(fd, False, 2, LEASE_S),
    }
    os.close(fd)


def has_all(gauges: dict[str, float]) -> bool:
    """Whether a node's last step had both cores."""
    return gauges["step_cores"] == 2


def shares(gauges: dict[str, float]) -> bool:
    """Whether it had one of them, at least for a part of it."""
    return 0 < gauges["step_cores"] < 2


@asynccontextmanager
async def without_end(client: Client, num_prompt: int, num_output: int) -> AsyncIterator[None]:
    """Meanwhile there are such requests, one after the other, each with a prompt of its own."""

    async def send() -> None:
        for number in count():
            prompt = make_prompt(num_prompt, f"{num_output} {number}")
            await client.complete(prompt, num_output)

    sending = asyncio.create_task(send())
    try:
        yield
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def test_tokens_are_those_of_transformers(client: Client, tiny_checkpoint: Path) -> None:
    reference = Reference(tiny_checkpoint)
    outputs = await asyncio.gather(
        *(client.complete(make_prompt(length), NUM_OUTPUT) for length in LENGTHS)
    )
    for output, length in zip(outputs, LENGTHS, strict=True):
        assert output.tokens == reference.greedy(make_prompt(length), NUM_OUTPUT), length


async def test_nodes_without_cores_of_their_own_are_not_calibrated(fleet: Fleet) -> None:
    with pytest.raises(CalibrationError, match="the cores of a node change from step to step"):
        await asyncio.to_thread(calibrating.measured, CalibrateConfig(url=fleet.url))


async def test_nodes_share_the_cores_while_both_compute_and_have_all_of_them_alone(
    fleet: Fleet, client: Client, tiny_checkpoint: Path, asked: dict[str, _native.CoreSplit]
) -> None:
    async def nobody_asks() -> bool:
        return not any(split.asked_by_other for split in asked.values())

    async def both_ask() -> bool:
        return all(split.asked_by_other for split in asked.values())

    await poll(nobody_asks, 20.0, lambda: "a node that has nothing to do asks for cores")
    prompt = make_prompt(100)
    async with without_end(client, 20, 500):
        await fleet.wait_for("decode-0", has_all)
        async with without_end(client, 3000, 1):
            await poll(both_ask, 20.0, lambda: "they have never computed at the same time")
            await fleet.wait_for("decode-0", shares)
            await fleet.wait_for("prefill-0", shares)
            output = await client.complete(prompt, 200)
        await fleet.wait_for("decode-0", has_all)
    assert output.tokens == Reference(tiny_checkpoint).greedy(prompt, 200)


async def test_whoever_is_left_has_all_cores(
    fleet: Fleet, client: Client, tiny_checkpoint: Path
) -> None:
    """The decode node stands still, goes on, is killed and started again; prompts never end."""

    async with without_end(client, 3000, 1), without_end(client, 20, 500):
        await fleet.wait_for("prefill-0", shares)
        fleet.send_signal("decode-0", signal.SIGSTOP)  # what it asks for expires
        await fleet.wait_for("prefill-0", has_all)
        fleet.send_signal("decode-0", signal.SIGCONT)
        await fleet.wait_for("prefill-0", shares)
        prompt = make_prompt(100, "left")
        stream = Follower(client, prompt, STREAMED)
        await stream.reached(3)
        await fleet.kill_node("decode-0")
        await fleet.wait_for("prefill-0", has_all)
        await fleet.start_node("decode-0")
        await fleet.wait_for("prefill-0", shares)
        await stream.reached(len(stream.output.token_ids) + 20)
        await stream.hang_up()
    await fleet.kill_node("prefill-0")
    await fleet.start_node("prefill-0")
    await client.complete(prompt, NUM_OUTPUT)
    assert Reference(tiny_checkpoint).is_greedy(prompt, stream.output.token_ids)
