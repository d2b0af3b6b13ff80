"""EAGLE-3 heads: what they compute, and that they change nothing but time."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from pdserve.engine.drafts.heads.eagle3 import MOST_ROWS, Eagle3Head, HeadPlan, parse_eagle3
from pdserve.engine.drafts.heads.head import BLOCK_TOKENS, HeadKv, HeadRows
from pdserve.engine.drafts.heads.source import HeadSource
from pdserve.engine.request import Scheduled
from pdserve.engine.steps.batch import Taps
from pdserve.engine.steps.tapped import Tapped
from pdserve.protocol import HeadRow
from pdserve.shared.errors import MalformedMessage, ModelError
from tests.heads import make_eagle3
from tests.matrix import matrix
from tests.plain_batch import build_batch
from tests.requests import make_request
from tests.unit.engine_model.drafted import Streams, answers, run, tokens_of
from tests.unit.engine_model.harness import DecoderKind, Node, make_prompt
from tests.unit.engine_model.test_drafts import requests

NUM_BLOCKS = 40
KINDS = {
    "llama": (LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding),
    "qwen3": (Qwen3Config, Qwen3DecoderLayer, Qwen3RotaryEmbedding),
}


def load(path: Path) -> Eagle3Head:
    values = json.loads((path / "config.json").read_text())
    return Eagle3Head.load(HeadPlan(path, parse_eagle3(values, str(path)), NUM_BLOCKS))


def reference(path: Path, tokens: list[int], rows: Tensor) -> list[int]:
    """What transformers' layer makes of it, one next token for each of these."""
    values = json.loads((path / "config.json").read_text())
    weights = load_file(path / "model.safetensors")
    config_of, layer_of, rope_of = KINDS[values["transformer_layer_config"]["model_type"]]
    config = config_of(**values["transformer_layer_config"])
    config._attn_implementation = "eager"
    layer = layer_of(config, 0)
    for name in ("q_proj", "k_proj", "v_proj"):
        old = getattr(layer.self_attn, name)
        wide = nn.Linear(2 * config.hidden_size, old.out_features, bias=False)
        setattr(layer.self_attn, name, wide)
    layer.hidden_norm = type(layer.input_layernorm)(config.hidden_size, config.rms_norm_eps)
    own = {n.removeprefix("layers.0."): w for n, w in weights.items() if n.startswith("layers")}
    layer.load_state_dict(own)

    def normed(x: Tensor, name: str) -> Tensor:
        norm = type(layer.input_layernorm)(x.shape[-1], config.rms_norm_eps)
        norm.load_state_dict({"weight": weights[name]})
        return norm(x)

    hidden = rows.flatten(1)
    if values["norm_before_fc"]:
        hidden = normed(hidden, "input_norm.weight")
    hidden = hidden @ weights["fc.weight"].T
    embedded = weights["embed_tokens.weight"][tokens]
    taken = layer.hidden_norm(hidden)
    residual = taken if values["norm_before_residual"] else hidden
    both = torch.cat([layer.input_layernorm(embedded), taken], dim=-1)[None]
    positions = torch.arange(1, len(tokens) + 1)[None]
    mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
    attended, _ = layer.self_attn(
        both, position_embeddings=rope_of(config)(both, positions), attention_mask=mask
    )
    hidden = residual + attended[0]
    hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    chosen = (normed(hidden, "norm.weight") @ weights["lm_head.weight"].T).argmax(-1)
    return (chosen + weights["d2t"][chosen]).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layer": {"model_type": "qwen3"}},
        {"norm_before_residual": True, "norm_before_fc": True},
    ],
    ids=["llama", "qwen3", "norms"],
)
@torch.inference_mode()
def test_it_computes_what_transformers_does(tmp_path: Path, options: dict[str, Any]) -> None:
    path = make_eagle3(tmp_path / "head", **options)
    head, rows = load(path), torch.randn(9, 3, 64)
    tokens = torch.randint(320, (9,)).tolist()
    expected = reference(path, tokens, rows)
    states, table = head.entered(rows.flatten(1)), head.pool.allocate(1)

    def said(*places: int) -> int:
        first = places[0]
        known = [tokens[place] for place in places]
        one = HeadRows(known, states[first : first + len(places)], 1 + first, first, table)
        return head.step([one])[0][0]

    assert [said(0, 1, 2, 3), *map(said, range(4, 9))] == expected[3:]


@torch.inference_mode()
def test_decoders_copy_out_what_transformers_has_before_a_layer(
    checkpoint_of: Callable[..., Path], kind: DecoderKind
) -> None:
    path = checkpoint_of("llama", num_hidden_layers=3)
    node, tokens = Node.load(path, kind), make_prompt(23)
    request = make_request(tokens, block_table=[5, 3])
    batch = build_batch([Scheduled(request, len(tokens))], 16, torch.device("cpu"))
    batch = replace(batch, sampled_rows=torch.tensor([4, 22]))
    taps = Taps(torch.tensor([0, 2, 2]), torch.full((2, 3, 64), torch.nan))
    node.model.logits(replace(batch, taps=taps), node.kv_cache.pool)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    expected = torch.stack([states[0][0], states[2][0], states[2][0]], dim=1)
    rounded = 1e-5 * expected.abs().max().item()  # values of 125 are among them
    torch.testing.assert_close(taps.out, expected[[4, 22]], atol=rounded, rtol=1e-4)


@torch.inference_mode()
def test_of_long_streams_it_forgets_the_oldest_block(tmp_path: Path) -> None:
    head = load(make_eagle3(tmp_path / "head"))
    kv, rows = HeadKv(head.pool, 3 * BLOCK_TOKENS), torch.randn(5 * BLOCK_TOKENS, 3, 64)
    tokens, states = torch.randint(320, (len(rows),)).tolist(), head.entered(rows.flatten(1))

    def said(begin: int, end: int) -> tuple[int, Tensor]:
        assert kv.has_room(end - begin)
        one = HeadRows(tokens[begin:end], states[begin:end], begin, kv.num_tokens, kv.block_table)
        kv.num_tokens += end - begin
        return head.step([one])[0]

    for begin in range(0, len(rows) - 1, 29):
        long = said(begin, min(begin + 29, len(rows) - 1))
    long = said(len(rows) - 1, len(rows))
    assert len(kv.block_table) == 3
    num_kept = kv.num_tokens
    kv.give_back()
    assert head.pool.num_free == NUM_BLOCKS
    said(len(rows) - num_kept, len(rows) - 1)
    assert not torch.equal(said(0, 1)[1], long[1])
    kv.give_back()


@torch.inference_mode()
def test_streams_together_draft_what_each_does_alone(tmp_path: Path) -> None:
    """More than are computed at a time, too."""
    head = load(make_eagle3(tmp_path / "head"))
    states = head.entered(torch.randn(30, 3 * 64))
    parts = [
        HeadRows([*range(number, number + 30)], states, number, number, [number])
        for number in range(NUM_BLOCKS // 2)
    ]
    assert sum(len(part.tokens) for part in parts) > 2 * MOST_ROWS
    together = head.step(parts)
    for part, (token, state) in zip(parts, together, strict=True):
        ((expected, alone),) = head.step([part])
        assert token == expected
        torch.testing.assert_close(state, alone)


def test_a_device_waits_for_drafts_that_gain_more_than_the_wait(
    checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    """Of a stream that is prompted, nothing is drafted; refusals are forgotten in time."""
    streams = Streams(Node.load(checkpoint_of("llama")), [])
    queues = streams.core.queues
    head = load(make_eagle3(tmp_path / "head"))
    source = HeadSource(head, streams.runner, queues, lambda _: 1.0, lambda: 0.0)
    (request,) = requests()[:1]
    rows = [Scheduled(request, 1)]
    assert not source.awaits(rows, 0.0), "it has not begun"
    streams.add(request)
    source.plan()
    assert source.awaits(rows, 0.1)
    assert not source.awaits(rows, 100.0)
    stream = source.drafter(request)
    assert stream is not None
    likely = stream.likely
    assert not source.awaits(rows, 100.0)
    assert stream.likely <= likely
    queues.waiting.append(make_request(make_prompt(3)))
    assert not source.awaits(rows, 0.1), "a prompt is not held up"


def test_wrong_taps_are_refused(checkpoint_of: Callable[..., Path]) -> None:
    node = Node.load(checkpoint_of("llama"))
    request = make_request(make_prompt(3), block_table=[5])
    batch = build_batch([Scheduled(request, 3)], 16, torch.device("cpu"))
    for out in (torch.empty(1, 2, 64), torch.empty(3, 1, 64), torch.empty(1, 1, 64).double()):
        wrong = replace(batch, taps=Taps(torch.tensor([1]), out))
        with pytest.raises((ValueError, TypeError), match="taps_out"):
            node.model.logits(wrong, node.kv_cache.pool)


@pytest.mark.parametrize("is_right", matrix([False, True], 1))
def test_it_changes_nothing(
    checkpoint_of: Callable[..., Path], kind: DecoderKind, tmp_path: Path, is_right: bool
) -> None:
    node = Node.load(checkpoint_of("llama"), kind)
    asked = requests()[:2] if is_right else requests()  # few, so that a token tells the next one
    expected = answers(node, asked)
    head = load(make_eagle3(tmp_path / "head"))
    streams = Streams(node, [])
    if is_right:
        know(head, tokens_of(expected))
    source = HeadSource(head, streams.runner, streams.core.queues, lambda _: 1.0, lambda: 0.0)
    streams.speculation.add(source)
    streams.core.draft = source.plan
    again = {request.request_id: request for request in requests()}
    run(streams, [again[request.request_id] for request in asked], random.Random(4))
    assert streams.core.draft() is None
    assert source.work.kv == (NUM_BLOCKS * head.block_bytes, 0)
    assert tokens_of(streams.answers()) == tokens_of(expected)
    if kind is DecoderKind.SERVED:
        assert streams.answers() == expected
    counts = streams.speculation.counts["model"]
    assert counts.drafted > 0
    assert (counts.accepted > 0.3 * counts.drafted) == is_right


@pytest.mark.parametrize("is_same", [True, False], ids=["its head", "another head"])
def test_its_drafts_begin_with_the_row_of_the_handoff(
    checkpoint_of: Callable[..., Path], tmp_path: Path, is_same: bool
) -> None:
    node, (asked,) = Node.load(checkpoint_of("llama")), requests()[:1]
    expected = answers(node, [asked])
    head = load(make_eagle3(tmp_path / "head"))
    know(head, tokens_of(expected))
    prefill, decode = Streams(node, []), Streams(node, [])
    HeadSource(head, prefill.runner, prefill.core.queues, lambda _: 1.0)
    source = HeadSource(head, decode.runner, decode.core.queues, lambda _: 1.0, lambda: 0.0)
    decode.speculation.add(source)
    (request,) = requests()[:1]
    prefill.add(request)
    assert request.tapped is not None
    sent = request.tapped.at(request.num_prompt_tokens - 1)
    assert sent is not None
    assert request.tapped.at(request.num_prompt_tokens) is None
    sent = sent if is_same else structs.replace(sent, head="another one")
    request.tapped = Tapped.of(sent, request.num_prompt_tokens - 1)
    decode.core.adopt(request)
    drafts = source.plan()
    assert (drafts is not None) == is_same
    if drafts is not None:
        drafts()
        (row,) = decode.core.begin_step()
        assert row.num_tokens > 1
        said = tokens_of(expected)[request.request_id]
        assert request.draft[0] == said[1]


def test_a_row_of_odd_size_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="7 bytes are no row of float32"):
        Tapped.of(HeadRow("head", b"7 bytes"), 3)


def test_a_head_that_fails_costs_drafts_and_nothing_else(
    checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    node = Node.load(checkpoint_of("llama"))
    head = load(make_eagle3(tmp_path / "head"))
    streams = Streams(node, [])
    source = HeadSource(head, streams.runner, streams.core.queues, lambda _: 1.0, lambda: 0.0)
    streams.speculation.add(source)
    streams.core.draft = source.plan
    know(head, {})  # breaks with the first token that it is asked about
    run(streams, requests()[:2])
    assert streams.answers() == answers(node, requests()[:2])
    assert streams.runner.taps is None
    assert streams.speculation.counts["model"].drafted == 0


def know(head: Eagle3Head, said: dict[str, list[int]]) -> None:
    """Have it compute as ever, and say what comes after a token in some answer."""
    after: dict[int, int] = {}
    for tokens in said.values():
        after |= dict(pairwise(tokens))
    compute = head.step

    def step(parts: Sequence[HeadRows], layer: int = 0) -> list[tuple[int, Tensor]]:
        assert after, "it knows something"
        found = zip(parts, compute(parts, layer), strict=True)
        return [(after.get(part.tokens[-1], token), state) for part, (token, state) in found]

    head.step = step  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"speculators_model_type": "dflash"}, "only eagle3"),
        ({"fc_norm": True}, "fc_norm"),
        ({"layer": {"num_hidden_layers": 2}}, "more than one layer"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "eagle_aux_hidden_state_layer_ids"),
        ({"layer": {"model_type": "mistral"}}, "one of llama, qwen3"),
    ],
)
def test_other_heads_are_refused_by_name(
    tmp_path: Path, overrides: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        make_eagle3(tmp_path / "head", **overrides)


def test_heads_of_other_models_and_broken_ones_are_refused(
    checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    path = make_eagle3(tmp_path / "head")
    values = json.loads((path / "config.json").read_text())
    model = Node.load(checkpoint_of("llama")).model.config
    for key, value, said in (("taps", [0, 1, 2], "layers 0, 1, 2 of 2"),):
        named = values | {"eagle_aux_hidden_state_layer_ids": value}
        with pytest.raises(ModelError, match=said):
            HeadPlan(path, parse_eagle3(named, key)).check_model(model)
    other = {"transformer_layer_config": values["transformer_layer_config"] | {"vocab_size": 321}}
    with pytest.raises(ModelError, match="vocab_size 321, not 320"):
        HeadPlan(path, parse_eagle3(values | other, "other")).check_model(model)
    weights = load_file(path / "model.safetensors")
    for name, changed, said in (
        ("fc.weight", None, "lacks fc.weight"),
        ("norm.weight", torch.ones(3), r"norm.weight of the head is \(3,\)"),
        ("d2t", torch.full((100,), 300), "names tokens"),
    ):
        broken = {n: w for n, w in weights.items() if n != name}
        save_file(
            broken if changed is None else broken | {name: changed}, path / "model.safetensors"
        )
        with pytest.raises(ModelError, match=said):
            load(path)
