"""Layers that predict further tokens: what they compute, and that they change nothing but time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
    DeepseekV3RotaryEmbedding,
)

from pdserve.engine.drafts.heads.head import BLOCK_TOKENS, HeadRows
from pdserve.engine.drafts.heads.mtp import Entrance, MtpHead, MtpPlan
from pdserve.engine.drafts.heads.source import HeadSource
from pdserve.engine.models.config import load_model_config
from pdserve.engine.models.torch_decoder import TorchDecoder
from pdserve.engine.plan.forms import ActivationDtype, form_of
from pdserve.engine.weights.codings import further_layer
from pdserve.engine.weights.load import load_torch_weights
from pdserve.kv import KvDtype
from pdserve.model_files.checkpoint import resolve_checkpoint
from tests.checkpoints import make_checkpoint
from tests.heads import add_mtp
from tests.native_attention import writing_attention
from tests.unit.engine_model.drafted import Streams, answers, run, tokens_of
from tests.unit.engine_model.harness import DecoderKind, Node
from tests.unit.engine_model.test_drafts import requests

NUM_BLOCKS = 12


def plan_of(path: Path, quantization: str = "none") -> MtpPlan:
    checkpoint, activations = resolve_checkpoint(str(path)), ActivationDtype.FLOAT32
    config = load_model_config(checkpoint)
    layer = further_layer(checkpoint, config, form_of(quantization, activations))
    layout = layer.config.kv_layout(BLOCK_TOKENS, KvDtype.FLOAT32)
    return MtpPlan(checkpoint, layer, activations, layout, NUM_BLOCKS, config.max_model_len)


def load(path: Path, kind: DecoderKind, quantization: str = "none") -> MtpHead:
    plan = plan_of(path, quantization)
    if kind is DecoderKind.SERVED:
        return MtpHead.load(plan, None, lambda _: None)
    cpu = torch.device("cpu")
    weights = load_torch_weights(plan.checkpoint, plan.layer, plan.activations, cpu)
    table = torch.full_like(weights.embedding, torch.nan)
    own = replace(weights, embedding=table)
    decoder = TorchDecoder(plan.layer.config, own, writing_attention(cpu))
    return MtpHead(plan, Entrance.load(plan, weights.embedding), table, decoder)


def reference(path: Path, tokens: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
    """The published formula, with transformers' layer: logits behind each token, and states."""
    config = DeepseekV3Config.from_pretrained(path)
    config._attn_implementation = "eager"
    number, stored = config.num_hidden_layers, load_file(path / "model.safetensors")
    prefix = f"model.layers.{number}."
    own = {n.removeprefix(prefix): w for n, w in stored.items() if n.startswith(prefix)}

    def normed(x: Tensor, name: str) -> Tensor:
        norm = DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)
        norm.load_state_dict({"weight": own[f"{name}.weight"]})
        made: Tensor = norm(x)
        return made

    layer = DeepseekV3DecoderLayer(config, number)
    ours = layer.state_dict()
    for name, stack in ours.items():
        if ".experts." not in name:
            stack.copy_(own[name])
            continue
        kinds = ("gate", "up") if "gate_up" in name else ("down",)
        for expert, matrix in enumerate(stack):
            parts = [own[f"mlp.experts.{expert}.{kind}_proj.weight"] for kind in kinds]
            matrix.copy_(torch.cat(parts))
    embedding = own.get("embed_tokens.weight", stored["model.embed_tokens.weight"])
    both = torch.cat([normed(embedding[tokens], "enorm"), normed(states, "hnorm")], dim=-1)
    hidden = (both @ own["eh_proj.weight"].T)[None]
    positions = torch.arange(len(tokens))[None]
    mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
    angles = DeepseekV3RotaryEmbedding(config)(hidden, positions)
    made = layer(hidden, attention_mask=mask, position_embeddings=angles)
    made = normed(made[0], "shared_head.norm")
    return made @ own["shared_head.head.weight"].T, made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return add_mtp(make_checkpoint(tmp_path / "model", "deepseek_v3"))


@pytest.mark.parametrize("has_embedding", [True, False], ids=["own embedding", "the model's"])
@torch.inference_mode()
def test_it_computes_what_the_formula_says(
    tmp_path: Path, kind: DecoderKind, has_embedding: bool
) -> None:
    path = make_checkpoint(tmp_path / "model", "deepseek_v3")
    head = load(add_mtp(path, has_embedding=has_embedding), kind)
    tokens, states = torch.randint(320, (9,)).tolist(), torch.randn(9, 64)
    logits, after = reference(path, tokens, states)
    tables = [head.pool.allocate(1), head.pool.allocate(1)]

    def part(begin: int, end: int, table: list[int]) -> HeadRows:
        return HeadRows(tokens[begin:end], states[begin:end], 1000 + begin, begin, table)

    known = head.step([part(0, 5, tables[0]), part(0, 8, tables[1])])
    known += head.step([part(5, 9, tables[0]), part(8, 9, tables[1])])
    assert [token for token, _ in known] == [logits[row].argmax() for row in (4, 7, 8, 8)]
    for row, (_, state) in zip((4, 7, 8, 8), known, strict=True):
        torch.testing.assert_close(state, after[row : row + 1], atol=1e-4, rtol=1e-4)


def test_it_changes_nothing(path: Path, kind: DecoderKind) -> None:
    check_answers(path, kind)


def test_it_changes_nothing_in_codes(path: Path) -> None:
    check_answers(path, DecoderKind.SERVED, "int8")


def check_answers(path: Path, kind: DecoderKind, quantization: str = "none") -> None:
    node = Node.load(path, kind, quantization=quantization)
    expected = answers(node, requests())
    streams = Streams(node, [])
    head = load(path, kind, quantization)
    source = HeadSource(head, streams.runner, streams.core.queues, lambda _: 1.0, lambda: 0.0)
    streams.speculation.add(source, source.work)
    streams.core.draft = source.plan
    run(streams, requests(), random.Random(4))
    assert tokens_of(streams.answers()) == tokens_of(expected)
    if kind is DecoderKind.SERVED:
        assert streams.answers() == expected
    assert streams.speculation.counts["model"].drafted > 0
    assert streams.core.draft() is None
    assert source.work.kv == (NUM_BLOCKS * head.block_bytes, 0)


def test_it_goes_on_from_what_the_model_ends_with(
    path: Path, checkpoint_of: Callable[..., Path]
) -> None:
    """Its first draft is that of the formula behind the prompt's last state, and token 1."""
    node, (request,) = Node.load(path), requests()[:1]
    streams, head = Streams(node, []), load(path, DecoderKind.SERVED)
    source = HeadSource(head, streams.runner, streams.core.queues, lambda _: 1.0, lambda: 0.0)
    streams.speculation.add(source, source.work)
    streams.add(request)
    states = torch.from_numpy(request.tapped.rows) if request.tapped is not None else None
    assert states is not None
    logits, _ = reference(path, request.output_token_ids, states)
    drafts = source.plan()
    assert drafts is not None
    drafts()
    (row,) = streams.core.begin_step()
    assert row.request.draft[0] == logits[-1].argmax()
