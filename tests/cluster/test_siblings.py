"""Several answers to one prompt: computed once, pulled once a node, each as if it were alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from coordinator.api.plan.generations import choice_seed
from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import Client, Follower
from tests.cluster.fleet import Fleet, fleet_config, running
from tests.matrix import matrix

PROMPT = 1003  # tokens: the last block is not full
LONG = 30_000  # tokens of a prompt or an answer that is not done before a test has seen it
BLOCK, TOKEN_BYTES = 16, 256
NUM_ANSWERS = 4
SEED = 2**62 + 5
DECODE = ("decode-0", "decode-1")
RANDOM = {"temperature": 1.0, "logprobs": 2, "presence_penalty": 0.5, "logit_bias": {"65": 3.0}}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def trio(tiny_checkpoint: Path) -> AsyncIterator[Fleet]:
    """Who decodes is by turns, and long prompts take several steps."""
    config = fleet_config(tiny_checkpoint, decode=2, engine={"token_budget": 256})
    async with running(Fleet(config)) as fleet:
        yield fleet


@pytest_asyncio.fixture(loop_scope="session")
async def client(trio: Fleet) -> AsyncIterator[Client]:
    await trio.restore()
    await trio.wait_back()
    async with Client(trio.url) as client:
        yield client
    await trio.assert_baseline()


async def computed_and_pulled(fleet: Fleet) -> tuple[float, list[float]]:
    """(tokens that were prefilled, KV bytes that each decode node has pulled) so far."""
    prefill, *decodes = [await fleet.gauges(name) for name in ("prefill-0", *DECODE)]
    return prefill["batch_tokens_sum"], [gauges["pulled_bytes"] for gauges in decodes]


@pytest.mark.parametrize("max_tokens", [20, 1])
async def test_answers_are_those_of_separate_calls(
    trio: Fleet, client: Client, max_tokens: int
) -> None:
    prompt = make_prompt(PROMPT, f"siblings {max_tokens}")
    tokens_before, bytes_before = await computed_and_pulled(trio)
    answers = await client.answers(prompt, max_tokens, n=NUM_ANSWERS, seed=SEED, **RANDOM)
    tokens_after, bytes_after = await computed_and_pulled(trio)
    assert tokens_after - tokens_before == PROMPT
    pulled = [after - before for after, before in zip(bytes_after, bytes_before, strict=True)]
    if max_tokens > 1:  # by the first of each node all of it, by the second its last block
        assert pulled == [(PROMPT + PROMPT % BLOCK) * TOKEN_BYTES] * 2
    else:
        assert pulled == [0, 0]
    assert answers[0].num_cached_tokens == 0
    assert answers[0].num_completion_tokens == NUM_ANSWERS * max_tokens
    assert len({tuple(answer.token_ids) for answer in answers}) > 1
    for index, answer in enumerate(answers):
        alone = await client.complete(prompt, max_tokens, seed=choice_seed(SEED, index), **RANDOM)
        assert answer.token_ids == alone.tokens
        assert answer.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
        assert answer.finish_reason == "length"


@pytest.mark.long  # a lost node loses no stream by default
@pytest.mark.parametrize("victim", matrix(["decode-1", "prefill-0"], 1))
async def test_a_lost_node_loses_no_answer_and_nothing_is_left(
    trio: Fleet, client: Client, victim: str
) -> None:
    """As of a call with one answer; the fixture looks for what is still held."""
    is_prefill = victim == "prefill-0"
    length, max_tokens = (LONG, 20) if is_prefill else (PROMPT, 400)
    prompt = make_prompt(length, f"lost {victim}")
    fields = {"n": NUM_ANSWERS, "seed": SEED, **RANDOM}
    expected = await client.answers(prompt, max_tokens, **fields)
    call = asyncio.create_task(client.answers(prompt, max_tokens, cache_salt="again", **fields))
    held = "pinned_blocks" if is_prefill else "running_requests"
    await trio.wait_for(victim, lambda gauges: gauges[held] > 0)
    await trio.kill_node(victim)
    if is_prefill:  # there is no other
        await trio.start_node(victim)
    answers = await call
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert answers[0].num_completion_tokens == NUM_ANSWERS * max_tokens


async def test_hanging_up_in_mid_prompt_frees_everything(trio: Fleet, client: Client) -> None:
    follower = Follower(client, make_prompt(LONG, "hang up"), 20, n=NUM_ANSWERS)
    await trio.wait_for(
        "prefill-0",
        lambda gauges: gauges["pinned_blocks"] > 0 and gauges["handoffs"] == NUM_ANSWERS,
    )
    await follower.hang_up()
    await trio.assert_baseline()
