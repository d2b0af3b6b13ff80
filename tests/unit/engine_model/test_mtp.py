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

from pdserve.engine.drafts.guesses import Shares
from pdserve.engine.drafts.heads.head import BLOCK_TOKENS, HeadRows
from pdserve.engine.drafts.heads.mtp import Entrance, MtpHead, MtpLayer, MtpPlan, kv_of
from pdserve.engine.drafts.heads.source import HeadDrafts, HeadSource
from pdserve.engine.drafts.heads.stream import HeadStream
from pdserve.engine.models.config import load_model_config
from pdserve.engine.models.torch_decoder import TorchDecoder
from pdserve.engine.plan.forms import ActivationDtype, form_of
from pdserve.engine.steps.tapped import Tapped
from pdserve.engine.weights.codings import further_layers
from pdserve.engine.weights.load import load_torch_weights
from pdserve.kv import KvDtype
from pdserve.model_files.checkpoint import resolve_checkpoint
from tests.checkpoints import make_checkpoint
from tests.heads import add_mtp
from tests.native_attention import writing_attention
from tests.requests import make_request
from tests.unit.engine_model.drafted import Streams, answers, run, tokens_of
from tests.unit.engine_model.harness import DecoderKind, Node, make_prompt
from tests.unit.engine_model.test_drafts import requests

NUM_BLOCKS = 12


def plan_of(path: Path, quantization: str = "none") -> MtpPlan:
    checkpoint, activations = resolve_checkpoint(str(path)), ActivationDtype.FLOAT32
    config = load_model_config(checkpoint)
    layers = further_layers(checkpoint, config, form_of(quantization, activations))
    layout = layers[0].config.kv_layout(BLOCK_TOKENS, KvDtype.FLOAT32)
    return MtpPlan(checkpoint, layers, activations, layout, NUM_BLOCKS, config.max_model_len)


def load(path: Path, kind: DecoderKind, quantization: str = "none") -> MtpHead:
    plan = plan_of(path, quantization)
    if kind is DecoderKind.SERVED:
        return MtpHead.load(plan, None, lambda _: None)
    cpu, layers = torch.device("cpu"), []
    for layer in plan.layers:
        weights = load_torch_weights(plan.checkpoint, layer, plan.activations, cpu)
        table = torch.full_like(weights.embedding, torch.nan)
        own = replace(weights, embedding=table)
        decoder = TorchDecoder(layer.config, own, writing_attention(cpu))
        entrance = Entrance.load(plan, layer, weights.embedding)
        layers.append(MtpLayer(entrance, table, decoder, kv_of(plan)))
    return MtpHead(plan, layers)


def reference(
    path: Path, tokens: list[int], states: Tensor, index: int = 0
) -> tuple[Tensor, Tensor]:
    """The published formula, with transformers' layer: logits behind each token, and states."""
    config = DeepseekV3Config.from_pretrained(path)
    config._attn_implementation = "eager"
    number, stored = config.num_hidden_layers + index, load_file(path / "model.safetensors")
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
        expected = after[row + 1 - len(state) : row + 1]
        torch.testing.assert_close(state, expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_each_layer_drafts_a_token_further(tmp_path: Path, kind: DecoderKind) -> None:
    """As the formula does from all that was said before, whatever was drafted until then."""
    path = add_mtp(make_checkpoint(tmp_path / "model", "deepseek_v3"), num_layers=3)
    head, chosen = load(path, kind), random.Random(3)
    request = make_request(make_prompt(7), max_tokens=200)
    stream = HeadStream(request, head, Shares())
    rows = torch.randn(40, 64)
    first, num_rounds = request.num_prompt_tokens - 1, 0
    while len(request.output_token_ids) < len(rows) - 4:
        begin, count = len(request.output_token_ids), chosen.randint(1, 4)
        request.output_token_ids += [chosen.randrange(320) for _ in range(count)]
        request.num_computed_tokens = request.num_tokens - 1
        stream.take(Tapped(head.name, first + begin, rows[begin : begin + count].numpy()))
        if chosen.random() < 0.3:
            continue  # with the next drafts
        most = chosen.randint(3, 5)
        assert stream.kv.has_room(stream.num_waiting + most)
        HeadDrafts(head, [(stream, most)], lambda: 0.0)()
        found, _ = stream.propose(request, most)
        assert found == formula(path, request.output_token_ids, rows[: begin + count], most)
        num_rounds += 1
    assert num_rounds > 5


def formula(path: Path, said: list[int], states: Tensor, most: int) -> list[int]:
    """What three layers draft behind tokens that followed these rows of the model."""
    drafts, before = list[int](), states
    for number in range(most):
        index = min(number, 2)
        tokens = [*said, *drafts]
        if number > 2:  # it goes on from its own
            states = torch.cat([before, states[-1:]])
        before = states
        logits, states = reference(path, tokens[index:], states, index)
        drafts.append(int(logits[-1].argmax()))
    return drafts


@pytest.mark.long
def test_layers_of_several_change_nothing(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "deepseek_v3")
    check_answers(add_mtp(model, num_layers=2), DecoderKind.SERVED)


def test_it_changes_nothing(path: Path, kind: DecoderKind) -> None:
    check_answers(path, kind)


@pytest.mark.long
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
