"""The ways in which a request ends by itself, wherever its last token is sampled."""

from __future__ import annotations

import asyncio

import pytest

from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import Client
from tests.cluster.prompts import EOS_TOKEN_ID

PROMPT = make_prompt(60, "endings")


async def test_one_token_takes_no_decode_node(client: Client) -> None:
    longer = await client.complete(PROMPT, 3)
    output = await client.complete(PROMPT, 1)
    assert output.tokens == longer.tokens[:1]
    assert output.finish_reason == "length"
    assert (output.prefill_node, output.decode_node) == ("prefill-0", None)


@pytest.mark.parametrize("position", [0, 1, 2, 7])
async def test_a_stop_token_at_any_position(client: Client, position: int) -> None:
    """The first one comes from the prefill node, while the decode node pulls for the second."""
    tokens = (await client.complete(PROMPT, 20)).tokens
    stop = tokens[position]
    position = tokens.index(stop)
    outputs = await asyncio.gather(
        *(client.stream_all(PROMPT, 20, stop_token_ids=[stop]) for _ in range(6))
    )
    for output in outputs:
        assert output.finish_reason == "stop"
        assert output.tokens == tokens[:position]


async def test_eos_as_the_first_token(client: Client) -> None:
    certain = {"logit_bias": {str(EOS_TOKEN_ID): 100}, "ignore_eos": False}
    outputs = await asyncio.gather(*(client.complete(PROMPT, 20, **certain) for _ in range(8)))
    assert all(output.tokens == [] for output in outputs)
    assert {output.finish_reason for output in outputs} == {"stop"}
