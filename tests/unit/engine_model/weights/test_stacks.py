"""Experts as gpt-oss stores them: all of a layer in one tensor, as numbers or as MXFP4."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdserve.engine.models.config import load_model_config
from pdserve.engine.plan.forms import BFLOAT16
from pdserve.engine.weights.codings import native_plan, stored_as
from pdserve.engine.weights.packing import packing
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.shared.errors import MisshapedTensor, MissingTensor, ModelError
from tests.checkpoints import edit_config, make_checkpoint
from tests.unit.engine_model.harness import DecoderKind, Node, make_prompt
from tests.unit.engine_model.weights.test_quantised import check_parts

STACK = "model.layers.0.mlp.experts.gate_up_proj"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def changed(path: Path, change: dict[str, Tensor | None]) -> Path:
    """Write these tensors, or leave them out."""
    file = path / "model.safetensors"
    tensors = load_file(file) | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    return path


def mxfp4(made: Path, path: Path) -> Path:
    """Store the experts of a checkpoint as codes; `made` gets the weights that they stand for."""
    shutil.copytree(made, path)
    torch.manual_seed(5)
    codes: dict[str, Tensor | None] = {}
    plain: dict[str, Tensor | None] = {}
    for name, tensor in load_file(made / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        num_experts, num_in, num_out = tensor.shape
        groups = (num_experts, num_out, num_in // 32)
        numbers = torch.randint(16, (*groups, 32), dtype=torch.uint8)
        exponents = torch.randint(121, 126, groups, dtype=torch.uint8)
        codes[f"{name}_blocks"] = numbers[..., ::2] | numbers[..., 1::2] << 4
        codes[f"{name}_scales"] = exponents
        codes[name] = None
        signs = 1.0 - 2.0 * (numbers >> 3)
        weights = signs * E2M1[(numbers & 7).int()] * 2.0 ** (exponents[..., None].float() - 127)
        plain[name] = weights.reshape(num_experts, num_out, num_in).mT.contiguous()
    changed(path, codes)
    changed(made, plain)
    edit_config(path, quantization_config={"quant_method": "mxfp4"})
    return path


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return make_checkpoint(
        tmp_path / "made", "gpt_oss", num_hidden_layers=1, intermediate_size=96, num_local_experts=3
    )


def test_codes_stand_for_weights_in_any_decoder(made: Path, tmp_path: Path) -> None:
    path, prompt = mxfp4(made, tmp_path / "q"), make_prompt(20)
    check_parts(path, made)
    for kind in DecoderKind:
        logits = [Node.load(each, kind).logits(prompt) for each in (path, made)]
        assert torch.equal(*logits)
        assert logits[0].std() > 0.01


def test_codes_are_kept_and_named(made: Path, tmp_path: Path) -> None:
    """In 5 bits, which lose nothing: a third of the bytes of bfloat16."""
    told = {}
    for path in (made, mxfp4(made, tmp_path / "q")):
        checkpoint = resolve_checkpoint(str(path))
        config = load_model_config(checkpoint)
        plan = native_plan(checkpoint, config, BFLOAT16)
        told[path.name] = packing(plan, stored_as(checkpoint, config))
    assert "mxfp4, 4-bit floats by 32 as 5 bits by 32 (6, " in told["q"]
    assert "exact" in told["q"].split("mxfp4")[1]
    assert told["made"].startswith("F32 as bfloat16 (9, ")


CASES: list[tuple[dict[str, Any], type[ModelError], str]] = [
    ({STACK: None}, MissingTensor, "neither .*gate_up_proj nor .*gate_up_proj_blocks"),
    ({STACK: torch.zeros(3, 64)}, MisshapedTensor, r"has the shape \[3, 64\]; .* 3 dimensions"),
    ({STACK: torch.zeros(3, 64, 100)}, MisshapedTensor, r"experts.0.gate_proj.weight has"),
    ({STACK: torch.zeros(2, 64, 192)}, MisshapedTensor, "has 2 experts, and more have biases"),
    ({f"{STACK}_bias": torch.zeros(4, 192)}, ModelError, "experts"),
    ({f"{STACK}_bias": None}, ModelError, "lacks|experts"),
    (
        {
            STACK: None,
            f"{STACK}_blocks": torch.zeros(3, 192, 2, 16),
            f"{STACK}_scales": torch.zeros(3, 192, 2, dtype=torch.uint8),
        },
        ModelError,
        "must be torch.uint8",
    ),
    (
        {
            STACK: None,
            f"{STACK}_blocks": torch.zeros(3, 192, 2, 15, dtype=torch.uint8),
            f"{STACK}_scales": torch.zeros(3, 192, 2, dtype=torch.uint8),
        },
        MisshapedTensor,
        "a scale is of 16 bytes",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), CASES)
def test_damaged_stacks_are_refused(
    made: Path, change: dict[str, Tensor | None], error: type[ModelError], message: str
) -> None:
    with pytest.raises(error, match=message):
        Node.load(changed(made, change), DecoderKind.TORCH)
