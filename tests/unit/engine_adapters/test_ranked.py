"""Adapters on several ranks and stages: the tokens of one rank, and of stages its bits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from pdserve.engine.adapters.adapter import Adapter
from pdserve.engine.adapters.read import read_adapter
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.ranks.sizes import Parallelism
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.shared.errors import AdapterRefused
from tests.adapters import ALL_LINEAR, make_adapter
from tests.checkpoints import make_checkpoint
from tests.matrix import matrix
from tests.requests import make_request
from tests.unit.engine_model.harness import Node, make_prompt
from tests.unit.engine_model.ranks.ranked import ranked_node

TENSOR, STAGES, BOTH = Parallelism(2), Parallelism(pipeline=2), Parallelism(2, 2)
PROMPT = make_prompt(150)  # two parts of a step, of several stages
BEGINS = 100
PREFIX = "base_model.model."
VOCAB, HIDDEN = 319, 64


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return 0.3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def adapters_of(folder: Path, base: Path, family: str) -> list[Adapter]:
    """Of all that an adapter may have, each in some of them."""
    linear = ALL_LINEAR if family == "llama" else ("q_proj", "w1", "w2", "w3", "moe.gate")
    ends = {
        f"{PREFIX}model.embed_tokens.lora_embedding_A": normal(5, VOCAB),
        f"{PREFIX}model.embed_tokens.lora_embedding_B": normal(HIDDEN, 5, seed=1),
        f"{PREFIX}lm_head.lora_A.weight": normal(5, HIDDEN, seed=2),
        f"{PREFIX}lm_head.lora_B.weight": normal(VOCAB, 5, seed=3),
    }
    trained = {
        f"{PREFIX}{name}.token_adapter.trainable_tokens_delta": normal(3, HIDDEN, seed=4)
        for name in ("model.embed_tokens", "lm_head")
    }
    ids = [PROMPT[3], 318, PROMPT[120]]
    whole = {
        f"{PREFIX}{name}.weight": normal(VOCAB, HIDDEN, seed=5)
        for name in ("model.embed_tokens", "lm_head")
    }
    indices = {"embed_tokens": ids, "lm_head": ids}
    folders = [
        make_adapter(folder / "ends", base, modules=linear, rank=5, own=ends),
        make_adapter(folder / "whole", base, modules=linear, rank=3, seed=1, own=whole),
        make_adapter(
            folder / "trained",
            base,
            modules=("q_proj",),
            own=trained,
            trainable_token_indices=indices,
            alora_invocation_tokens=PROMPT[BEGINS : BEGINS + 2],
        ),
    ]
    if family == "llama":
        folders.append(make_adapter(folder / "bias", base, rank=3, seed=2, lora_bias=True))
        folders.append(make_adapter(folder / "dora", base, rank=3, seed=3, use_dora=True))
    checkpoint = resolve_checkpoint(str(base))
    plan = ModelPlan.of(Node.load(base).model.config)
    return [read_adapter(folder, plan, checkpoint=checkpoint) for folder in folders]


def begins(adapter: Adapter) -> int:
    return BEGINS if adapter.invocation else 0


def said(node: Node, adapters: Sequence[Adapter]) -> list[list[int]]:
    """What is said with each of them, and without, all at once."""
    requests = [make_request(PROMPT, max_tokens=6)]
    for adapter in adapters:
        fields = {"adapter": adapter.digest, "adapted_from": begins(adapter)}
        requests.append(make_request(PROMPT, max_tokens=6, **fields))
    node.generate(requests, 6, chunk=70)
    return [request.output_token_ids for request in requests]


CASES = [("llama", TENSOR), ("llama", BOTH), ("llama", STAGES), ("mixtral", TENSOR)]


@pytest.mark.parametrize(("family", "parallelism"), matrix(CASES, 1), ids=str)
def test_ranks_have_their_shares_of_adapters(
    family: str, parallelism: Parallelism, tmp_path: Path
) -> None:
    base = make_checkpoint(tmp_path / "base", family, vocab_size=VOCAB)
    alone, adapters = Node.load(base), adapters_of(tmp_path, base, family)
    for adapter in adapters:
        alone.model.take_adapter(adapter)
    expected = said(alone, adapters)
    assert len(set(map(tuple, expected))) == len(expected), "each says something else"
    with ranked_node(base, parallelism) as (node, _):
        for adapter in adapters:
            node.model.take_adapter(adapter)
        assert said(node, adapters) == expected
        for adapter in adapters:
            fields = {"adapter": adapter.digest, "adapted_from": begins(adapter)}
            found, whole = node.logits(PROMPT, **fields), alone.logits(PROMPT, **fields)
            is_scaled = any(part.factors is not None for part in adapter.parts.values())
            if parallelism == STAGES and not is_scaled:
                assert torch.equal(found, whole), adapter
            else:
                assert (found - whole).abs().max() < 1e-3
        node.model.drop_adapter(adapters[0].digest)
        assert said(node, adapters[1:]) == [expected[0], *expected[2:]]


def test_an_adapter_that_one_rank_cannot_take_is_taken_by_none(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "llama", vocab_size=VOCAB)
    (ends, *_, dora) = adapters_of(tmp_path, base, "llama")
    with ranked_node(base, STAGES) as (node, ranks):
        node.model.take_adapter(dora)
        os.kill(ranks.pids[0], 9)
        with pytest.raises(AdapterRefused, match="a rank has not taken"):
            node.model.take_adapter(ends)
