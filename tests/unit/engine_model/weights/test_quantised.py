"""Quantised checkpoints: the weights are those that the codes stand for, and so are the logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pdserve.engine.models.config import load_model_config
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.weights.codings import stored_as
from pdserve.engine.weights.packing import packing
from pdserve.engine.weights.stored import StoredTensor, open_tensors
from pdserve.model_files.checkpoint import resolve_checkpoint
from tests.checkpoints import make_checkpoint
from tests.quantised_files import FORMATS, quantised
from tests.unit.engine_model.harness import DecoderKind, Node, make_prompt

LONG = [
    pytest.param(family, name, marks=pytest.mark.long)
    for family in ("llama", "mistral", "qwen2", "qwen3", "phi3", "mixtral", "qwen3_moe")
    for name in FORMATS
    if (family == "llama") != (name in FORMATS)
]


def opened(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint's model."""
    checkpoint = resolve_checkpoint(str(path))
    config = load_model_config(checkpoint)
    plan = ModelPlan.of(config)
    return open_tensors(
        checkpoint,
        plan.expected(),
        ties_embeddings=config.ties_embeddings,
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
    [*(("llama", name) for name in FORMATS), ("mixtral", "gptq"), *LONG],
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


def test_it_is_said_how_matrices_are_stored(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "made", "llama", num_hidden_layers=1)
    quantised(made, tmp_path / "q", FORMATS["gptq"], num_files=2)
    checkpoint = resolve_checkpoint(str(tmp_path / "q"))
    config = load_model_config(checkpoint)
    said = packing(ModelPlan.of(config), stored_as(checkpoint, config))
    assert "gptq, 4 bits by" in said
    assert "as bfloat16 (4, " in said
