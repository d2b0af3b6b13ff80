"""Nodes with weights by role: prompts that come again for a stream, and what records must say."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.protocol import DecodeLeg, Prompt, SamplingParams, Subscribe
from pdserve.shared.errors import MalformedMessage
from tests.fakes.exporter import SOURCE, make_ticket
from tests.unit.decode_node.test_intake import Bench, check_ended
from tests.waits import turn

KNOWN = [70, 71, 72]  # output, after a prompt of 10 tokens


def resumed(bench: Bench) -> asyncio.Task[None]:
    """A stream whose node is gone, and whose prompt a prefill node computes again."""
    leg = DecodeLeg(
        request_id="r~1",
        prompt=Prompt(list(range(10))),
        sampling=SamplingParams(max_tokens=20),
        source=SOURCE,
        output_token_ids=KNOWN,
    )
    request = bench.intake.expected(leg, SOURCE)
    return asyncio.create_task(bench.intake.take(request, leg.prompt_id, SOURCE))


async def test_a_stream_goes_on_after_the_kv_of_its_prompt_alone() -> None:
    """Token 1 is sampled again, and known. What follows has KV of this node's weights."""
    bench = Bench(is_by_role=True)
    bench.puller.gate.set()
    taking = resumed(bench)
    await turn()
    (subscribe,) = bench.exporter.outbox.sent
    assert isinstance(subscribe, Subscribe)
    assert subscribe.num_emitted == 0, "it is a prefill there, and no stream"
    bench.announce(0, 8, request_id="r~1")
    bench.record("r~1", output=(70,), ticket=make_ticket(8, 10), num_by_prefill=10)
    await asyncio.wait_for(taking, 30)
    (request,) = bench.engine.queues.running
    assert request.output_token_ids == KNOWN
    assert (request.num_computed_tokens, request.num_uncomputed_tokens) == (10, 3)
    assert (request.num_by_prefill, request.num_prompt_misfits) == (10, 0)
    assert len(request.block_table) == 4, "for its next token, too"
    hashes = Prompt([*range(10), *KNOWN]).hashes(4)
    assert len(bench.pool.match_prefix(hashes)) == 2, "of the prompt"
    rows = bench.engine.begin_step()
    assert [(row.num_tokens, row.samples) for row in rows] == [(3, True)]
    bench.engine.abandon_step(rows, [])
    check_ended(bench)


@pytest.mark.parametrize(
    ("is_by_role", "said"), [(True, None), (False, 10), (True, 11), (True, -1)]
)
async def test_a_record_says_whose_weights_have_made_what(
    is_by_role: bool, said: int | None
) -> None:
    bench = Bench(is_by_role=is_by_role)
    bench.puller.gate.set()
    taking = bench.take()
    await turn()
    bench.announce(0, 8)
    bench.record(ticket=make_ticket(8, 10), num_by_prefill=said)
    with pytest.raises(MalformedMessage, match=f"have made {said} of the first 10"):
        await asyncio.wait_for(taking, 30)
    check_ended(bench)
