"""Adapters against merged weights, any mix in one batch, on both decoders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from pdserve.engine.adapters.adapter import Adapter
from pdserve.engine.adapters.read import read_adapter
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.request import Request
from tests.adapters import ALL_LINEAR, make_adapter, merged
from tests.checkpoints import make_checkpoint
from tests.requests import make_request
from tests.unit.engine_model.harness import DecoderKind, Node, make_prompt

KINDS = [DecoderKind.TORCH]
CASES = {
    "llama": ("llama", ALL_LINEAR, {}),
    "qwen2, attention alone": ("qwen2", ("q_proj", "v_proj"), {}),
    "phi3, fused": ("phi3", ("qkv_proj", "gate_up_proj", "o_proj"), {}),
    "glm, neighbours rotated": ("glm", ("q_proj", "k_proj", "gate_up_proj"), {}),
    "granite4": ("granite4", ("v_proj", "input_linear", "output_linear"), {}),
    "mixtral, each expert": ("mixtral", ("q_proj", "w1", "w2", "w3", "block_sparse_moe.gate"), {}),
    "gemma3": ("gemma3", ALL_LINEAR, {}),
    "llama, head": ("llama", ("q_proj", "lm_head"), {}),
}


def take(node: Node, folder: Path) -> Adapter:
    """Load an adapter into the node's decoder."""
    adapter = read_adapter(folder, ModelPlan.of(node.model.config))
    node.model.take_adapter(adapter)
    return adapter


def outputs(
    node: Node, requests: Sequence[Request], num_tokens: int, chunk: int
) -> list[list[int]]:
    """Greedy tokens of requests that are computed together."""
    node.generate(requests, num_tokens, chunk)
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_rows_have_the_tokens_of_merged_weights(
    name: str, kind: DecoderKind, tmp_path: Path
) -> None:
    family, modules, fields = CASES[name]
    base = make_checkpoint(tmp_path / "base", family, **fields)
    node = Node.load(base, kind)
    folders = [
        make_adapter(tmp_path / f"a{n}", base, modules=modules, rank=3 + 2 * n, seed=n)
        for n in range(2)
    ]
    digests = ["", *(take(node, folder).digest for folder in folders)]
    models = [base, *(merged(tmp_path / f"m{f.name}", base, f) for f in folders)]
    prompts = [make_prompt(30 + 11 * n, n % 3) for n in range(6)]
    requests = [
        make_request(prompt, adapter=digests[n % 3], max_tokens=8)
        for n, prompt in enumerate(prompts)
    ]
    found = outputs(node, requests, 8, chunk=23)
    for number, model in enumerate(models):
        alone = Node.load(model, kind)
        own = [make_request(prompts[n], max_tokens=8) for n in range(number, 6, 3)]
        assert found[number::3] == outputs(alone, own, 8, chunk=23), model.name
    assert found[0] != found[1] != found[2] != found[0], "adapters change what is said"
