"""Adapters against merged weights, any mix in one batch, on both decoders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pdserve.engine.adapters.adapter import Adapter
from pdserve.engine.adapters.read import read_adapter
from pdserve.engine.drafts.source import Source
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.models.config import load_model_config
from pdserve.engine.plan.forms import FLOAT32, ActivationDtype
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.weights.load import load_decoder
from pdserve.kv import KvDtype
from pdserve.model_files.checkpoint import Checkpoint, resolve_checkpoint
from pdserve.shared.errors import AdapterRefused
from tests.adapters import ALL_LINEAR, make_adapter, merged
from tests.checkpoints import make_checkpoint
from tests.kernels.cases import EACH_VARIANT
from tests.matrix import matrix
from tests.plain_batch import build_batch
from tests.reference import Reference
from tests.requests import make_request
from tests.unit.engine_model.drafted import Streams, Told
from tests.unit.engine_model.harness import (
    CPU,
    DecoderKind,
    Node,
    load_torch_decoder,
    make_prompt,
)

KINDS = [DecoderKind.TORCH, DecoderKind.SERVED]
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


def take(node: Node, folder: Path, checkpoint: Checkpoint | None = None) -> Adapter:
    """Load an adapter into the node's decoder."""
    adapter = read_adapter(folder, ModelPlan.of(node.model.config), checkpoint=checkpoint)
    node.model.take_adapter(adapter)
    return adapter


def outputs(
    node: Node, requests: Sequence[Request], num_tokens: int, chunk: int
) -> list[list[int]]:
    """Greedy tokens of requests that are computed together."""
    node.generate(requests, num_tokens, chunk)
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", matrix(CASES, 2))
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


@pytest.mark.parametrize("dtype", matrix(["float32", "bfloat16"], {"bfloat16"}))
def test_the_bits_of_a_row_do_not_depend_on_its_batch(dtype: str, tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "llama")
    folders = [
        make_adapter(tmp_path / "plain", base, rank=5),
        make_adapter(tmp_path / "bias", base, rank=6, seed=1, lora_bias=True),
        make_adapter(tmp_path / "dora", base, rank=7, seed=2, use_dora=True),
    ]
    checkpoint = resolve_checkpoint(str(base))

    def states(order: Sequence[int], chunk: int) -> dict[int, torch.Tensor]:
        """The keys and values of requests with different adapters, by their numbers."""
        node = Node.load(base, dtype=KvDtype(dtype))
        digests = ["", *(take(node, folder, checkpoint).digest for folder in folders)]
        requests = {n: make_request(make_prompt(40, n), adapter=digests[n % 4]) for n in order}
        node.generate(list(requests.values()), 3, chunk)
        return {n: node.kv_cache.pool[each.block_table[:2]] for n, each in requests.items()}

    together = states(range(8), chunk=40)
    for order, chunk in (([3, 7, 1, 0], 17), ([5], 40), ([2], 1)):
        for number, found in states(order, chunk).items():
            same = found.view(torch.uint8) == together[number].view(torch.uint8)
            assert same.all(), (number, order)


@pytest.mark.parametrize("quantization", matrix(["none", "int8"], 1))
def test_adapters_are_as_near_as_merged_weights(quantization: str, tmp_path: Path) -> None:
    """In bfloat16, and on a base of int8: what is added rounds hardly more."""
    base = make_checkpoint(tmp_path / "base", "llama")
    folder = make_adapter(tmp_path / "a", base, rank=8, strength=0.3)
    model, prompt = merged(tmp_path / "merged", base, folder), make_prompt(60)
    exact = Node.load(model).logits(prompt)

    def error(path: Path, *, is_adapted: bool) -> float:
        node = Node.load(path, dtype=KvDtype.BFLOAT16, quantization=quantization)
        digest = take(node, folder).digest if is_adapted else ""
        found = node.logits(prompt, adapter=digest)
        return float((found - exact).norm() / exact.norm())

    assert error(base, is_adapted=True) < 1.25 * error(model, is_adapted=False)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_may_have_an_output_matrix_of_its_own(kind: DecoderKind, tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "llama", tie_word_embeddings=True)
    generator = torch.Generator().manual_seed(3)
    own_head = torch.randn(320, 64, generator=generator)
    own = {"base_model.model.lm_head.weight": own_head}
    folder = make_adapter(tmp_path / "a", base, modules=(), own=own)
    node, prompt = Node.load(base, kind), make_prompt(50)
    digest = take(node, folder).digest
    state = node.logits(prompt)
    assert torch.equal(node.logits(prompt), state), "nor does a loaded adapter change others"
    reference = Reference(base)
    expected = reference.states(prompt) @ own_head.T
    assert (node.logits(prompt, adapter=digest) - expected).abs().max() < 1e-3


def test_drafts_of_adapted_streams_change_no_token(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "llama")
    node = Node.load(base)
    digests = [
        "",
        *(take(node, make_adapter(tmp_path / f"a{n}", base, seed=n)).digest for n in (1, 2)),
    ]

    def said(sources: Sequence[Source] | None) -> tuple[dict[str, list[int]], int]:
        streams, num_steps = Streams(node, sources, eos_token_ids=frozenset()), 0
        for n in range(6):
            streams.add(
                make_request(
                    make_prompt(20, n), adapter=digests[n % 3], max_tokens=24, request_id=f"r{n}"
                )
            )
        while streams.step():
            num_steps += 1
        return {of: [t.token_id for t in tokens] for of, tokens in streams.said.items()}, num_steps

    plain, steps_of_one = said(None)
    drafted, num_steps = said([Told(plain, seed=0)])
    assert drafted == plain
    assert num_steps < steps_of_one


@pytest.mark.parametrize("variant", EACH_VARIANT)
def test_all_builds_add_the_same(variant: str, tmp_path: Path) -> None:
    """Odd ranks and shapes, gated or not, with biases or DoRA, in a batch that mixes adapters."""
    base = make_checkpoint(tmp_path / "base", "qwen2", intermediate_size=72)
    checkpoint = resolve_checkpoint(str(base))
    plan = ModelPlan.of(load_model_config(checkpoint), form=FLOAT32)
    folders = [
        make_adapter(tmp_path / "a", base, rank=3, lora_bias=True),
        make_adapter(tmp_path / "b", base, rank=11, use_dora=True),
    ]
    adapters = [read_adapter(folder, plan, checkpoint=checkpoint) for folder in folders]
    rows = []
    for n, num_tokens in enumerate((1, 5, 30, 2)):
        digest = ["", adapters[0].digest, adapters[1].digest, adapters[0].digest][n]
        request = make_request(make_prompt(num_tokens, n), adapter=digest)
        request.block_table = [2 * n, 2 * n + 1]
        rows.append(Scheduled(request, num_tokens))
    batch = build_batch(rows, 16, CPU)
    cache = KvCache(plan.config.kv_layout(16, KvDtype.FLOAT32), 8, CPU)
    found = []
    for decoder in (
        load_decoder(checkpoint, plan, ActivationDtype.FLOAT32, CPU, kernels=variant),
        load_torch_decoder(checkpoint, plan, ActivationDtype.FLOAT32, CPU),
    ):
        for adapter in adapters:
            decoder.take_adapter(adapter)
        with torch.inference_mode():
            logits = decoder.logits(batch, cache.pool)
        assert logits is not None
        found.append(logits.clone())
    assert (found[0] - found[1]).abs().max() < 5e-4


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "llama", tie_word_embeddings=True)
    embedding = load_file(base / "model.safetensors")["model.embed_tokens.weight"]

    def adapter(name: str, saved: torch.Tensor) -> Path:
        own = {
            "base_model.model.lm_head.base_layer.weight": saved,
            "base_model.model.lm_head.lora_A.weight": torch.ones(4, 64),
            "base_model.model.lm_head.lora_B.weight": torch.ones(320, 4),
        }
        return make_adapter(tmp_path / name, base, own=own)

    for kind in KINDS:
        node = Node.load(base, kind)
        take(node, adapter(f"own {kind}", embedding.half()))
        with pytest.raises(AdapterRefused, match="another model"):
            take(node, adapter(f"other {kind}", embedding.flip(0)))
