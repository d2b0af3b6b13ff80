"""A draft model changes nothing but time: whatever it says, whatever a request asks for."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.engine.drafts.model.draft_model import DraftModel
from pdserve.engine.drafts.model.source import ModelSource
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request
from pdserve.measured.perf_model import PerfModel
from pdserve.protocol import StepCosts
from tests.requests import make_request
from tests.unit.engine_model.drafted import Said, Streams, answers, run, tokens_of
from tests.unit.engine_model.harness import DecoderKind, Node, make_prompt
from tests.unit.engine_model.test_drafts import SEEDED, requests

FREE = StepCosts(knot_tokens=[1, 64], knot_s=[1e-6, 1e-6])
VOCAB_SIZE = 320


def add_model(
    streams: Streams,
    drafter: Node,
    num_blocks: int = 0,
    costs: StepCosts = FREE,
    vocab_size: int = VOCAB_SIZE,
) -> ModelSource:
    """Have these streams guess with another model, which costs hardly anything."""
    layout = drafter.kv_cache.layout
    pool = BlockPool(num_blocks or drafter.kv_cache.num_blocks, layout.block_size)
    model = DraftModel(drafter.runner, pool, layout.block_bytes, PerfModel(costs), vocab_size, 4096)
    source = ModelSource(model, streams.core.queues, lambda shape: 1.0, 64)
    streams.speculation.add(source, source.work)
    streams.core.draft = source.plan
    return source


def equal(found: dict[str, Said], expected: dict[str, Said], kind: DecoderKind) -> bool:
    """Whether all is equal. Torch's products of other numbers of rows may round otherwise."""
    if kind is DecoderKind.SERVED:
        return found == expected
    return tokens_of(found) == tokens_of(expected)


@pytest.fixture
def node(checkpoint_of: Callable[..., Path], kind: DecoderKind) -> Node:
    return Node.load(checkpoint_of("llama"), kind)


@pytest.fixture
def drafter(checkpoint_of: Callable[..., Path], kind: DecoderKind) -> Callable[[int], Node]:
    return lambda seed: Node.load(checkpoint_of("llama", seed=seed), kind, block_size=32)


@pytest.mark.parametrize("seed", [0, 1], ids=["the same model", "a random one"])
def test_a_draft_model_changes_nothing(
    node: Node, drafter: Callable[[int], Node], kind: DecoderKind, seed: int
) -> None:
    expected = answers(node, requests())
    streams = Streams(node, [])
    source = add_model(streams, drafter(seed))
    run(streams, requests(), random.Random(3))
    assert equal(streams.answers(), expected, kind)
    counts = streams.speculation.counts["model"]
    right = counts.accepted / counts.drafted
    assert right > 0.8 if seed == 0 else right < 0.2
    assert source.plan() is None
    layout = drafter(seed).kv_cache.layout
    num_bytes = drafter(seed).kv_cache.num_blocks * layout.block_bytes
    (state,) = streams.speculation.states()
    assert (state.kv_bytes, state.used_kv_bytes) == (num_bytes, 0)
    assert source.work.tokens > counts.drafted
    assert source.work.seconds > 0


def test_streams_without_room_in_its_pool_go_without(
    node: Node, drafter: Callable[[int], Node], kind: DecoderKind
) -> None:
    expected = answers(node, requests())
    streams = Streams(node, [])
    source = add_model(streams, drafter(0), num_blocks=4)
    run(streams, requests())
    assert equal(streams.answers(), expected, kind)
    assert streams.speculation.counts["model"].accepted > 0
    assert source.plan() is None
    assert source.work.pool.num_free == 4


def test_long_prompts_are_computed_in_slices(node: Node, drafter: Callable[[int], Node]) -> None:
    def asked() -> list[Request]:
        prompt = make_prompt(300)
        return [make_request(prompt, request_id="long", max_tokens=40, **SEEDED)]

    expected = answers(node, asked())
    streams = Streams(node, [])
    add_model(streams, drafter(0))
    run(streams, asked())
    assert tokens_of(streams.answers()) == tokens_of(expected)
    assert streams.speculation.counts["model"].accepted > 15
