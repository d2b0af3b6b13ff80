"""Multiplexed mode with real processes: one node computes both phases on shares of two cores.

Its pool has 256 blocks of 16 tokens, which a dozen requests fill. What a request gets is compared
with a co-located node, and with transformers.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, redirect_stderr
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from coordinator.api.plan.generations import choice_seed
from pdserve.commands.cli.main import main
from pdserve.commands.simulation.calibrate import run as calibrating
from pdserve.commands.simulation.calibrate.config import CalibrateConfig
from pdserve.settings.config import PolicyConfig
from pdserve.settings.values import format_cpus
from pdserve.shared.errors import CalibrationError
from tests.cluster.checkpoints import Reference, make_prompt
from tests.cluster.client import Client, Follower, Output
from tests.cluster.fleet import Fleet, fleet_config, running

CORES = sorted(os.sched_getaffinity(0))[:2]
NODE = "decode-0"
BLOCK = 16
LENGTHS = (1, 15, 16, 38, 333, 1500)
NUM_OUTPUT = 12
STREAMED = 3500  # more than is waited for
CROWD = 14  # requests, which need twice as many blocks as there are
ENGINE = {
    "token_budget": 37,
    "max_model_len": 4096,
    "kv_memory": "1MiB",
    "threads": 0,
    "cpus": format_cpus(CORES),
}
GREEDY = PolicyConfig(kv_headroom="greedy", watermark=0)  # so that streams are preempted

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="one core cannot be split")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fleet(tiny_checkpoint: Path) -> AsyncIterator[Fleet]:
    config = fleet_config(tiny_checkpoint, mode="multiplexed", engine=ENGINE, policy=GREEDY)
    async with running(Fleet(config)) as fleet:
        assert (await fleet.gauges(NODE))["blocks"] == 256
        yield fleet


@pytest_asyncio.fixture(loop_scope="session")
async def client(fleet: Fleet) -> AsyncIterator[Client]:
    async with Client(fleet.url) as client:
        yield client
    await fleet.assert_baseline(within_s=20.0)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def colocated(tiny_checkpoint: Path) -> AsyncIterator[Client]:
    """A client of a node that computes both phases in the same steps, with room for all."""
    engine = ENGINE | {"kv_memory": "8MiB"}
    config = fleet_config(tiny_checkpoint, mode="colocated", engine=engine)
    async with running(Fleet(config)) as fleet, Client(fleet.url) as client:
        yield client


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


# ---- the same tokens -----------------------------------------------------------------------------


async def test_tokens_are_those_of_transformers(client: Client, tiny_checkpoint: Path) -> None:
    reference = Reference(tiny_checkpoint)
    outputs = await asyncio.gather(
        *(client.complete(make_prompt(length), NUM_OUTPUT) for length in LENGTHS)
    )
    for output, length in zip(outputs, LENGTHS, strict=True):
        assert output.tokens == reference.greedy(make_prompt(length), NUM_OUTPUT), length
        assert (output.prefill_node, output.decode_node) == (None, NODE)


def sampled(index: int) -> dict[str, Any]:
    """One of many requests, of all lengths; together they need far more than the pool."""
    return {
        "prompt": make_prompt(1 + index * 89 % 400, index),
        "max_tokens": 300 + index * 31 % 400,
        "temperature": (0.0, 0.7, 1.3)[index % 3],
        "seed": index,
        "presence_penalty": 0.5 * (index % 2),
    }


@pytest.mark.long  # crowds are compared in test_exactness.py
async def test_a_crowd_that_is_preempted_gets_what_it_gets_on_a_co_located_node(
    fleet: Fleet, client: Client, colocated: Client
) -> None:
    before = await fleet.gauges(NODE)
    crowd = await asyncio.gather(*(client.complete(**sampled(i)) for i in range(CROWD)))
    after = await fleet.gauges(NODE)
    assert after["preemptions"] > before["preemptions"], "nothing was preempted"
    assert after["pulled_bytes"] == after["exported_bytes"] == 0
    there = await asyncio.gather(*(colocated.complete(**sampled(i)) for i in range(CROWD)))
    for index, (output, other) in enumerate(zip(crowd, there, strict=True)):
        assert output.tokens == other.tokens, index
        assert output.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.long
async def test_a_prefix_that_a_stream_uses_is_shared(client: Client, colocated: Client) -> None:
    prompt = make_prompt(300, "shared")
    for tail in (0, 1, 20):
        longer = prompt + make_prompt(tail, "tail")
        stream = Follower(client, prompt, STREAMED)
        await stream.reached(2)
        output = await client.complete(longer, NUM_OUTPUT)
        assert not stream.output.is_done
        await stream.hang_up()
        assert output.tokens == (await colocated.complete(longer, NUM_OUTPUT)).tokens
        assert output.num_cached_tokens >= (len(prompt) - 1) // BLOCK * BLOCK


@pytest.mark.long  # over a handoff it is in test_structured.py
async def test_a_grammar_is_followed_from_one_phase_to_the_other(
    client: Client, colocated: Client
) -> None:
    """What samples token 1 is not what samples the others."""
    fields: dict[str, Any] = {"guided_regex": "[a-f]{3}(-[0-9]{4}){5}", "ignore_eos": False}

    async def ask(client: Client, seed: int) -> Output:
        return await client.complete(
            make_prompt(20, seed), 60, seed=seed, temperature=1.0, **fields
        )

    outputs = await asyncio.gather(*(ask(client, seed) for seed in range(6)))
    for seed, output in enumerate(outputs):
        assert re.fullmatch(fields["guided_regex"], output.text)
        assert output.tokens == (await ask(colocated, seed)).tokens


async def test_several_answers_to_one_prompt(client: Client, colocated: Client) -> None:
    prompt, fields = make_prompt(203, "siblings"), {"temperature": 1.0, "presence_penalty": 0.5}
    answers = await client.answers(prompt, 20, n=3, seed=7, **fields)
    assert len({tuple(answer.token_ids) for answer in answers}) == 3
    for index, answer in enumerate(answers):
        alone = await colocated.complete(prompt, 20, seed=choice_seed(7, index), **fields)
        assert answer.token_ids == alone.tokens


# ---- cores ---------------------------------------------------------------------------------------


@pytest.mark.long  # threads do in tests/kernels/test_core_split.py
async def test_phases_share_the_cores_while_both_compute_and_have_all_of_them_alone(
    fleet: Fleet, client: Client, tiny_checkpoint: Path
) -> None:
    prompt = make_prompt(100)
    async with without_end(client, 20, 500):
        await fleet.wait_for(NODE, lambda gauges: gauges["decode_step_cores"] == 2)
        async with without_end(client, 3000, 1):
            await fleet.wait_for(NODE, lambda gauges: 0 < gauges["decode_step_cores"] < 2)
            await fleet.wait_for(NODE, lambda gauges: 0 < gauges["prompt_step_cores"] < 2)
            output = await client.complete(prompt, 200)
        await fleet.wait_for(NODE, lambda gauges: gauges["decode_step_cores"] == 2)
    await client.complete(make_prompt(3000, "alone"), 1)
    await fleet.wait_for(NODE, lambda gauges: gauges["prompt_step_cores"] == 2)
    assert output.tokens == Reference(tiny_checkpoint).greedy(prompt, 200)


async def test_nodes_without_cores_of_their_own_are_not_calibrated(fleet: Fleet) -> None:
    with pytest.raises(CalibrationError, match="the cores of a node change from step to step"):
        await asyncio.to_thread(calibrating.measured, CalibrateConfig(url=fleet.url))


async def test_such_a_node_does_not_leave_its_pool(fleet: Fleet, client: Client) -> None:
    said = StringIO()

    def order() -> int:
        with redirect_stderr(said):
            return main(["role", NODE, "prefill", "--force", "--url", fleet.url])

    assert await asyncio.to_thread(order) == 1
    assert f"{NODE} cannot become a prefill node: it computes both phases" in said.getvalue()
    assert len((await client.complete(make_prompt(5), 4)).tokens) == 4


# ---- early ends ----------------------------------------------------------------------------------


async def test_whoever_hangs_up_leaves_nothing_behind(fleet: Fleet, client: Client) -> None:
    """In the queue, in the prompt's steps and in decode; the fixture looks for what is held."""
    streams = [Follower(client, make_prompt(40, i), STREAMED) for i in range(3)]
    for stream in streams:
        await stream.reached(2)
    prompts = [Follower(client, make_prompt(3000, f"hang up {i}"), 5) for i in range(3)]
    await fleet.wait_for(NODE, lambda gauges: gauges["prompt_step_cores"] > 0)
    await fleet.wait_for(NODE, lambda gauges: gauges["queue_tokens"] > 0)
    for follower in (*prompts, *streams):
        await follower.hang_up()


@pytest.mark.long  # nodes of two pools do by default
async def test_a_node_that_stands_still_or_dies_loses_no_stream(
    fleet: Fleet, client: Client, tiny_checkpoint: Path
) -> None:
    """A stream and a prompt are under way each time."""
    prompt, long = make_prompt(100, "left"), make_prompt(3000, "left")
    stream = Follower(client, prompt, STREAMED)
    await stream.reached(3)
    fleet.send_signal(NODE, signal.SIGSTOP)
    seen = len(stream.output.token_ids)
    late = Follower(client, long, NUM_OUTPUT)
    fleet.send_signal(NODE, signal.SIGCONT)
    await stream.reached(seen + 20)
    assert not stream.output.is_done
    await fleet.kill_node(NODE)
    await fleet.start_node(NODE)
    reference = Reference(tiny_checkpoint)
    for follower, asked, length in ((stream, prompt, STREAMED), (late, long, NUM_OUTPUT)):
        tokens = (await follower.end()).tokens
        assert len(tokens) == length
        assert reference.is_greedy(asked, tokens)


@pytest.mark.long  # nodes of two pools do by default
async def test_a_node_that_drains_ends_what_it_has(fleet: Fleet, client: Client) -> None:
    stream, late = (Follower(client, make_prompt(n, "drain"), 300) for n in (20, 3000))
    await stream.reached(2)
    ended = await fleet.drain_node(NODE)
    assert ended.returncode == 0
    for follower in (stream, late):
        assert len((await follower.end()).tokens) == 300
    await fleet.start_node(NODE)
