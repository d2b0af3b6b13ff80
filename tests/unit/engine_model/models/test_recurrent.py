"""Layers with a state (Qwen3-Next), against transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve import _native
from pdserve.engine.interface import OthersSampled
from pdserve.engine.models.config import ModelConfig, load_model_config
from pdserve.engine.native.choice import digest_of
from pdserve.engine.plan.forms import ActivationDtype, form_of
from pdserve.engine.request import Request, Scheduled
from pdserve.kv import KvDtype
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.protocol import BadWord
from pdserve.shared.errors import ModelError
from tests.checkpoints import edit_config, make_checkpoint, with_plain_tensors
from tests.matrix import matrix
from tests.requests import make_request
from tests.unit.engine_model.harness import EACH_DECODER, DecoderKind, Node, make_prompt
from tests.unit.engine_model.reference import assert_matches

Mutant = Callable[[ModelConfig], ModelConfig]

CASES: dict[str, dict[str, Any]] = {
    "of a full layer between": {},
    "state last, one head a group": {
        "layer_types": ["full_attention", "linear_attention"],
        "num_hidden_layers": 2,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 33,
        "linear_conv_kernel_dim": 2,
        "tie_word_embeddings": True,
    },
    "one group, biases, MLPs": {
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 70,
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "attention_bias": True,
        "mlp_only_layers": [1],
        "seed": 1,
        "norm_topk_prob": False,
    },
}


# What is special, left out or done otherwise.
MUTANTS: dict[str, Mutant] = {
    "all of a head rotated": lambda config: replace(
        config, ropes=tuple(rope and replace(rope, rotated_share=1.0) for rope in config.ropes)
    ),
    "weights of experts that do not add up to 1": lambda config: replace(
        config,
        experts=config.experts and replace(config.experts, normalizes_weights=False),
    ),
}


@EACH_DECODER
@pytest.mark.parametrize("case", matrix(CASES, 2))
def test_matches_transformers(
    case: str, kind: DecoderKind, checkpoint_of: Callable[..., Path]
) -> None:
    assert_matches(checkpoint_of("qwen3_next", **CASES[case]), kind, num_prompt=100)


@pytest.mark.parametrize(
    "tensor",
    matrix(["conv1d", "A_log", "dt_bias", "linear_attn.norm", "shared_expert_gate", "q_norm"], 2),
)
def test_what_is_special_matters(
    tensor: str, kind: DecoderKind, checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    """Else a match would not tell whether it is there."""
    path = checkpoint_of("qwen3_next")
    without = with_plain_tensors(path, tmp_path / "changed", tensor, 0.3)
    prompt = make_prompt(60)
    right, wrong = (Node.load(each, kind).logits(prompt) for each in (path, without))
    assert (right - wrong).abs().mean() > 1e-3


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_say_something_else(
    mutant: str, kind: DecoderKind, checkpoint_of: Callable[..., Path]
) -> None:
    path, prompt = checkpoint_of("qwen3_next"), make_prompt(60)
    right, wrong = (
        Node.load(path, kind, change=change).logits(prompt) for change in (None, MUTANTS[mutant])
    )
    assert (right - wrong).abs().mean() > 1e-3


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(KvDtype.FLOAT32, None), (KvDtype.BFLOAT16, KvDtype.INT8)],
)
def test_chunks_and_batches_change_no_bit(
    dtype: KvDtype, kv_dtype: KvDtype | None, checkpoint_of: Callable[..., Path]
) -> None:
    """A state is the same wherever prompts are divided, and however its blocks divide it."""
    path = checkpoint_of("qwen3_next")
    prompts = [make_prompt(length, seed=length) for length in (70, 33, 2)]
    outputs, rows = [], []
    for chunk, block_size in ((10**6, 16), (7, 4), (1, 5)):
        node = Node.load(path, dtype=dtype, kv_dtype=kv_dtype, block_size=block_size)
        requests = [make_request(prompt) for prompt in prompts]
        for batch in [requests] if chunk > 7 else [[request] for request in requests]:
            node.generate(batch, 12, chunk)
        outputs.append([request.output_token_ids for request in requests])
        rows.append([state_of(node, request) for request in requests])
    assert outputs[0] == outputs[1] == outputs[2]
    assert rows[0] == rows[1] == rows[2]


def test_a_step_without_a_token_for_one_has_those_of_the_others(
    checkpoint_of: Callable[..., Path],
) -> None:
    """Their states have gone on, so it is not repeated for them."""
    path = checkpoint_of("qwen3_next")
    node = Node.load(path, dtype=KvDtype.FLOAT32)
    impossible = make_request(9, allowed_token_ids=[3], bad_words=[BadWord([3])])
    others = [make_request(make_prompt(length)) for length in (20, 5)]
    rows = [Scheduled(each, each.num_tokens) for each in (others[0], impossible, others[1])]
    with pytest.raises(OthersSampled) as failed:
        node.step(rows)
    assert failed.value.request_ids == [impossible.request_id]
    alone = Node.load(path, dtype=KvDtype.FLOAT32)
    copies = [make_request(each.prompt_token_ids) for each in others]
    first, _, last = failed.value.sampled
    assert [first, last] == [alone.step([Scheduled(each, each.num_tokens)])[0] for each in copies]


def state_of(node: Node, request: Request) -> bytes:
    """All of it, from its blocks."""
    blocks = node.kv_cache.pool.view(torch.uint8).view(node.kv_cache.num_blocks, -1)
    return blocks[request.state_blocks].numpy().tobytes()[: node.kv_cache.layout.state_bytes]


@pytest.mark.parametrize(
    ("dtype", "quantization"), [(KvDtype.FLOAT32, "none"), (KvDtype.BFLOAT16, "int8")]
)
def test_builds_of_one_digest_go_on_alike(
    dtype: KvDtype, quantization: str, checkpoint_of: Callable[..., Path]
) -> None:
    """Also where products agree in all builds, as those of integers do."""
    path, prompt = checkpoint_of("qwen3_next"), make_prompt(40)
    found: dict[str, set[bytes]] = {}
    for variant in _native.kernel_variants():
        node = Node.load(path, dtype=dtype, quantization=quantization, kernels=variant)
        request = make_request(prompt)
        node.generate([request], 2)
        form = form_of(quantization, ActivationDtype(dtype))
        digest = digest_of(variant, ActivationDtype(dtype), form, has_states=True)
        found.setdefault(digest, set()).add(state_of(node, request))
    assert {len(states) for states in found.values()} == {1}


def test_a_state_takes_blocks_of_the_pool(checkpoint_of: Callable[..., Path]) -> None:
    config = load_model_config(resolve_checkpoint(str(checkpoint_of("qwen3_next"))))
    layout = config.kv_layout(16, KvDtype.FLOAT32)
    assert layout.num_layers == 1
    assert layout.token_bytes == 2 * 2 * 24 * 4
    a_layer = 3 * (2 * 2 * 20 + 6 * 12) + 6 * 20 * 12  # the last inputs, and a matrix a head
    a_layer += 16 * (2 * 20 + 6 * 12) + 6 * 17  # a chunk's keys and deltas, and their shares
    assert layout.state_bytes == 2 * a_layer * 4
    assert layout.state_blocks == -(-layout.state_bytes // layout.block_bytes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_num_value_heads": 5}, "linear_num_value_heads is 5; it must be a multiple of 2"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1; it must be"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types .* with full_attention"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types .* full_attention and linear"),
    ],
)
def test_what_cannot_be_is_refused(
    change: dict[str, Any], message: str, checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "qwen3_next")
    edit_config(tmp_path, **change)
    with pytest.raises(ModelError, match=message):
        load_model_config(resolve_checkpoint(str(tmp_path)))
