"""A node with weights of its role: what it computes, what of that has hashes, and what it says."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from pdserve.engine.request import Request
from pdserve.node.legs import request_of, token_event
from pdserve.protocol import (
    DecodeLeg,
    LegFailed,
    NodeRole,
    PrefillLeg,
    Prompt,
    SamplingParams,
    TokenBatch,
)
from pdserve.settings.config import EngineConfig
from tests.unit.node.one_node import BLOCK, MAX_TOKENS, Bench
from tests.unit.node.test_roles import output

PREFILL, DECODE = NodeRole
PROMPT = Prompt(list(range(9)))
SAMPLING = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench(DECODE, bound_to=DECODE, engine=EngineConfig(token_budget=4))
    yield bench
    bench.check_idle()
    await bench.close()


def misfits(bench: Bench) -> list[int]:
    """Of each event that says so."""
    batches = [message for message in bench.link.sent if isinstance(message, TokenBatch)]
    events = [event for batch in batches for event in batch.each()]
    return [e.decode_precision_tokens for e in events if e.decode_precision_tokens]


def adopted(bench: Bench, num_known: int) -> Request:
    """Its prompt's KV has come from a prefill node, after so many tokens on a node that is gone."""
    leg = DecodeLeg(
        request_id="r",
        prompt=PROMPT,
        sampling=SAMPLING,
        output_token_ids=output(num_tokens=num_known),
    )
    bench.parts.legs.open("r", bench.link)
    request = request_of(leg, 0.0)
    request.num_by_prefill = request.num_computed_tokens = request.num_prompt_tokens
    request.block_table = bench.parts.pool.allocate(4)
    bench.parts.engine.adopt(request)
    return request


def cached(bench: Bench, token_ids: list[int]) -> int:
    """Tokens whose blocks the prefix cache has."""
    return len(bench.parts.pool.match_prefix(Prompt(token_ids).hashes(BLOCK))) * BLOCK


async def test_a_prompt_without_prefill_nodes_is_computed_and_said_to_be(bench: Bench) -> None:
    """And nobody takes its KV for what those would have made."""
    for emitted in (0, 2):
        leg = DecodeLeg(
            request_id=f"r{emitted}",
            prompt=PROMPT,
            sampling=SAMPLING,
            output_token_ids=output(num_tokens=emitted),
        )
        bench.services.start_decode(leg, bench.link)
        bench.run()
    assert misfits(bench) == [9, 9]
    counter = "pdserve_decode_precision_tokens_total"
    assert bench.parts.metrics.registry.get_sample_value(counter) == 18, "once, of several chunks"
    assert cached(bench, PROMPT.token_ids) == 0


async def test_prefixes_that_a_prefill_node_has_made_are_used_for_it(bench: Bench) -> None:
    pool = bench.parts.pool
    blocks = pool.allocate(2)
    for block, name in zip(blocks, PROMPT.hashes(BLOCK), strict=True):
        pool.publish(block, name)
    pool.release(blocks)
    leg = DecodeLeg(request_id="r", prompt=PROMPT, sampling=SAMPLING)
    bench.services.start_decode(leg, bench.link)
    bench.run()
    assert misfits(bench) == [1]
    assert cached(bench, PROMPT.token_ids) == 8


async def test_what_it_makes_of_an_answer_has_no_hash(bench: Bench) -> None:
    """Its prompt has: a prefill node has made that."""
    request = adopted(bench, num_known=3)
    bench.run()
    assert misfits(bench) == []
    everything = [*PROMPT.token_ids, *request.output_token_ids]
    assert cached(bench, everything) == 8
    assert token_event(request, None, None).decode_precision_tokens == 0


async def test_a_preempted_stream_goes_to_a_prefill_node_again(bench: Bench) -> None:
    request = adopted(bench, num_known=3)
    bench.step()
    bench.parts.engine.queues.preempt(request)
    bench.step()
    preemptions = bench.parts.engine.queues.preemptions
    for recalled in preemptions.to_recall:
        bench.services.recall(recalled)
    preemptions.to_recall = []
    bench.run()
    (failure,) = [message for message in bench.link.sent if isinstance(message, LegFailed)]
    assert failure.request_id == "r"
    assert failure.code == "out_of_blocks"
    assert "weights of prefill nodes" in failure.message


async def test_legs_for_other_weights_are_refused(bench: Bench) -> None:
    leg = PrefillLeg(request_id="r", prompt=PROMPT, sampling=SAMPLING)
    bench.services.start_prefill(leg, bench.link)
    (failure,) = bench.link.sent
    assert isinstance(failure, LegFailed)
    assert failure.code == "role_refused"
    bench.services.set_role(PREFILL)
    assert bench.services.role is DECODE
