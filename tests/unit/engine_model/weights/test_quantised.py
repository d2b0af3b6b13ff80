"""Quantised checkpoints: the weights are those that the codes stand for, and so are the logits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.engine.models.config import load_model_config
from pdserve.engine.plan.forms import BFLOAT16
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.weights.codings import native_plan, stored_as
from pdserve.engine.weights.opening import open_tensors
from pdserve.engine.weights.packing import packing
from pdserve.engine.weights.stored.tensors import StoredTensor
from pdserve.model_files.checkpoint import resolve_checkpoint
from tests.checkpoints import make_checkpoint
from tests.matrix import matrix
from tests.quantised_files import AWQ, FORMATS, Written, gptq_config, quantised
from tests.quantised_writers import gptq_of
from tests.unit.engine_model.harness import DecoderKind, Node, make_prompt

LONG = [
    pytest.param(family, name, marks=pytest.mark.long)
    for family in ("llama", "mistral", "qwen2", "qwen3", "phi3", "mixtral", "qwen3_moe")
    for name in FORMATS
    if (family == "llama") != (name in FORMATS)
]

# Of each way to code a case, in a format that has most of it.
TELLING = {
    ("mixtral", "gptq"),
    *(("llama", name) for name in ("awq", "gptq-v2", "packed-zeros", "packed-order", "fp8-block")),
    *(("llama", name) for name in ("modelopt-nvfp4", "mxfp4", "nf4-nested", "llm-int8")),
}


def opened(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint's model."""
    checkpoint = resolve_checkpoint(str(path))
    config = load_model_config(checkpoint)
    plan = ModelPlan.of(config)
    return open_tensors(
        checkpoint,
        plan.expected(),
        ignored=plan.ignored(),
        within=plan.within(),
    )


def check_parts(path: Path, plain: Path) -> None:
    """All weights, and parts as ranks read them, are those of the plain checkpoint."""
    stored, expected = opened(path), opened(plain)
    assert list(stored.keys() ^ expected.keys()) == []
    random = np.random.default_rng(0)
    for name, tensor in expected.items():
        cuts = [sorted(random.integers(0, size, 2)) for size in tensor.shape]
        part = tuple(slice(int(start), int(stop) + 1) for start, stop in cuts)
        for some in ((), part[:1], part):
            assert torch.equal(stored[name][some].float(), expected[name][some].float()), name


@pytest.mark.parametrize(
    ("family", "name"),
    [*matrix([("mixtral", "gptq"), *(("llama", name) for name in FORMATS)], TELLING), *LONG],
)
def test_a_quantised_checkpoint_computes_what_its_codes_stand_for(
    family: str, name: str, tmp_path: Path
) -> None:
    wide = {"moe_intermediate_size": 64} if family == "qwen3_moe" else {}
    made = make_checkpoint(tmp_path / "made", family, num_hidden_layers=1, **wide)
    plain = quantised(made, tmp_path / "q", FORMATS[name], num_files=2)
    check_parts(tmp_path / "q", plain)
    prompt = make_prompt(20)
    for kind in DecoderKind:
        logits = [Node.load(path, kind).logits(prompt) for path in (tmp_path / "q", plain)]
        assert torch.equal(*logits)
        assert logits[0].std() > 0.01


@pytest.mark.parametrize("name", matrix(FORMATS, 4))
def test_what_is_told_of_weights_names_no_raw_codes(name: str, tmp_path: Path) -> None:
    """But how they are quantised, what they are packed as, bytes, and the error."""
    made = make_checkpoint(tmp_path / "made", "llama", num_hidden_layers=1)
    quantised(made, tmp_path / "q", FORMATS[name], num_files=2)
    checkpoint = resolve_checkpoint(str(tmp_path / "q"))
    config = load_model_config(checkpoint)
    told = packing(native_plan(checkpoint, config, BFLOAT16), stored_as(checkpoint, config))
    for form in told.split("; "):
        stored, _, packed = form.partition(" as ")
        assert stored == "F32" or re.fullmatch(
            r"[\w-]+, \d(-bit floats| bits)( by [\dx ]+)?", stored
        )
        assert re.fullmatch(r".+ \(\d+, [\d.]+ MiB, (exact|off by .+)\)", packed)


@pytest.mark.parametrize(("bits", "num_tokens"), [(8, 257), (4, 259), (2, 270)])
def test_a_gptq_head_may_have_any_number_of_tokens(
    bits: int, num_tokens: int, tmp_path: Path
) -> None:
    """gptqmodel gives the head 8 bits of its own, and rounds words of zero points up."""
    made = make_checkpoint(tmp_path / "made", "llama", num_hidden_layers=1, vocab_size=num_tokens)
    config = gptq_config(4, 32, dynamic={"lm_head": {"bits": bits, "group_size": 16}})
    of_head = Written(config, gptq_of(bits, 16), lambda module: module == "lm_head")
    check_parts(tmp_path / "q", quantised(made, tmp_path / "q", of_head))


@pytest.mark.parametrize("block", ["block_sparse_moe", "mlp"])
def test_experts_as_others_call_them(block: str, tmp_path: Path) -> None:
    """Mixtral of llm-compressor has parts of new names, of gptqmodel blocks, too; so do targets."""
    made = make_checkpoint(tmp_path / "made", "mixtral", num_hidden_layers=1)
    kind = FORMATS["packed"]
    group = kind.config["config_groups"]["group_0"]
    targets = {"targets": ["re:.*attn.*_proj$", rf"re:.*\.{block}\..*_proj$"]}
    config = kind.config | {"config_groups": {"group_0": group | targets}}
    plain = quantised(made, tmp_path / "q", Written(config, kind.write))
    file = tmp_path / "q/model.safetensors"
    renamed = {}
    for name, tensor in load_file(file).items():
        for old, new in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            name = name.replace(f".{old}.", f".{new}.")
        renamed[name.replace("block_sparse_moe", block)] = tensor
    save_file(renamed, file)
    check_parts(tmp_path / "q", plain)
    checkpoint = resolve_checkpoint(str(tmp_path / "q"))
    kinds = stored_as(checkpoint, load_model_config(checkpoint))
    assert kinds["model.layers.0.block_sparse_moe.experts.3.w2.weight"].endswith("4 bits by 32")


def test_awq_without_zero_points_has_zero_points_of_8(tmp_path: Path) -> None:
    """So do those who write it: both libraries that can."""
    made = make_checkpoint(tmp_path / "made", "llama", num_hidden_layers=1)
    symmetric = Written(AWQ.config | {"zero_point": False}, AWQ.write)
    check_parts(tmp_path / "q", quantised(made, tmp_path / "q", symmetric))


def test_modules_of_other_bits_by_auto_round(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "made", "llama", num_hidden_layers=1)
    kind = FORMATS["auto-round"]
    extra = {r"model\.layers\.\d+\.mlp.*": {"bits": 8}, "lm_head": {"bits": 16}}
    four, eight = gptq_of(4, 32, has_order=False), gptq_of(8, 32, has_order=False)

    def write(random: np.random.Generator, num_out: int, num_in: int) -> Any:
        return (eight if 96 in (num_out, num_in) else four)(random, num_out, num_in)

    mixed = Written(kind.config | {"extra_config": extra}, write)
    check_parts(tmp_path / "q", quantised(made, tmp_path / "q", mixed))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("awq", "awq, 4 bits by 16 as 4 bits by 16 (4, 0.0 MiB, exact)"),
        ("gptq", "gptq, 4 bits by 32 as bfloat16 (4, 0.1 MiB, off by up to 0.2 %)"),  # desc_act
        ("gptq-v2", "gptq, 8 bits as 8 bits by 64 (3, 0.0 MiB, exact)"),
        ("packed", "compressed-tensors, 4 bits by 32 as 4 bits by 32 (4, 0.0 MiB, exact)"),
    ],
)
def test_codes_are_packed_as_they_are_where_that_is_exact(
    name: str, said: str, tmp_path: Path
) -> None:
    made = make_checkpoint(tmp_path / "made", "llama", num_hidden_layers=1)
    quantised(made, tmp_path / "q", FORMATS[name], num_files=2)
    checkpoint = resolve_checkpoint(str(tmp_path / "q"))
    config = load_model_config(checkpoint)
    plan = native_plan(checkpoint, config, BFLOAT16)
    assert said in packing(plan, stored_as(checkpoint, config)).split("; ")
