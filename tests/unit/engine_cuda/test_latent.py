"""Latent attention (DeepSeek) and gpt-oss on a GPU, against transformers in float32.

Sizes are odd ones: a rank that is no multiple of 64, one head, one group of experts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from pdserve.engine.models.arithmetic import Activation
from pdserve.engine.models.config import ModelConfig, load_model_config
from pdserve.engine.plan.forms import FLOAT32, ActivationDtype
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.weights.load import load_torch_weights
from pdserve.model_files.checkpoint import resolve_checkpoint
from tests.checkpoints import make_checkpoint, with_plain_tensors
from tests.fakes.late_copies import PromptCopies
from tests.matrix import matrix
from tests.requests import make_request
from tests.unit.engine_cuda.decoders import make_node
from tests.unit.engine_model.harness import Node, make_prompt
from tests.unit.engine_model.latent_models import LATENT, LATENT_MUTANTS, Mutant
from tests.unit.engine_model.reference import assert_node_matches

pytestmark = pytest.mark.usefixtures("interpreted")

CPU = torch.device("cpu")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v3 of one head": LATENT["v3 of one head"],
    "gpt-oss": ("gpt_oss", {"sliding_window": 5}),
    **LATENT,
    "gpt-oss without grouping": (
        "gpt_oss",
        {"num_key_value_heads": 4, "hidden_size": 60, "sliding_window": 5},
    ),
}


def cuda_node(path: Path, change: Mutant = lambda config: config) -> Node:
    """`change`: of what the checkpoint says."""
    from pdserve.engine.cuda.attention.triton_attention import TritonAttention
    from pdserve.engine.cuda.copies.staging import Staging
    from pdserve.engine.cuda.decoder import CudaDecoder

    checkpoint = resolve_checkpoint(str(path))
    config = change(load_model_config(checkpoint))
    plan = ModelPlan.of(config, form=FLOAT32)
    weights = load_torch_weights(checkpoint, plan, ActivationDtype.FLOAT32, CPU)
    staging = Staging(PromptCopies())
    return make_node(CudaDecoder(config, weights, TritonAttention(), staging, None))


@pytest.mark.parametrize("case", matrix(CASES, 1))
def test_matches_transformers(case: str, tmp_path: Path) -> None:
    """A prompt in one step, and decode steps behind it."""
    family, overrides = CASES[case]
    path = make_checkpoint(tmp_path, family, **overrides)
    assert_node_matches(path, cuda_node(path), num_prompt=14, num_output=3)


def without_clamps(config: ModelConfig) -> ModelConfig:
    return replace(config, arithmetic=replace(config.arithmetic, activation=Activation.SILU))


def without_windows(config: ModelConfig) -> ModelConfig:
    return replace(config, sliding_windows=(None,) * config.num_layers)


# Of a case: what is special of it, left out or done otherwise.
MUTANTS: dict[str, tuple[str, Mutant]] = {
    **LATENT_MUTANTS,
    "experts without clamps": ("gpt-oss", without_clamps),
    "no windows": ("gpt-oss", without_windows),
    "windows of other layers": (
        "gpt-oss",
        lambda config: replace(config, sliding_windows=config.sliding_windows[::-1]),
    ),
}
# Of a case: a tensor whose numbers are all alike in the mutant, and what they are.
PLAIN: dict[str, tuple[str, str, float]] = {
    "no sinks": ("gpt-oss", "sinks", -1e4),
    "no bias of the router": ("gpt-oss", "router.bias", 0.0),
    "no bias of what experts take": ("gpt-oss", "gate_up_proj_bias", 0.0),
    "no bias of what experts make": ("gpt-oss", "down_proj_bias", 0.0),
    "no bias of experts' scores": ("v3", "e_score_correction_bias", 0.0),
}


@pytest.mark.long
@pytest.mark.parametrize("mutant", [*MUTANTS, *PLAIN])
def test_what_is_special_matters(mutant: str, tmp_path: Path) -> None:
    """Else the tests above would not tell whether it is there."""
    case, *_ = MUTANTS.get(mutant) or PLAIN[mutant]
    family, overrides = CASES[case]
    path = make_checkpoint(tmp_path / "right", family, **overrides)
    if mutant in MUTANTS:
        wrong = cuda_node(path, MUTANTS[mutant][1])
    else:
        _, part, number = PLAIN[mutant]
        wrong = cuda_node(with_plain_tensors(path, tmp_path / "changed", part, number))
    prompt = make_prompt(30)
    difference = (cuda_node(path).logits(prompt) - wrong.logits(prompt)).abs()
    assert difference.mean() > 1e-3, "50 times what a match may be off"


@pytest.mark.long
@pytest.mark.parametrize("case", ["v3 of one head", "gpt-oss"])
def test_chunks_and_batches_change_no_token(case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    path = make_checkpoint(tmp_path, family, **overrides)
    outputs = []
    for chunk in (10**6, 4):
        node = cuda_node(path)
        requests = [make_request(make_prompt(n, seed=n)) for n in (11, 1)]
        node.generate(requests, 3, chunk)
        outputs.append([request.output_token_ids for request in requests])
    assert outputs[0] == outputs[1]
