"""Layers with a state on a GPU, against what CPUs compute, and behind what they have left."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from pdserve.engine.attention.reference import ReferenceAttention
from pdserve.engine.models.config import load_model_config
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.models.torch_decoder import TorchDecoder
from pdserve.engine.plan.forms import FLOAT32, ActivationDtype
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.weights.load import load_torch_weights
from pdserve.model_files.checkpoint import resolve_checkpoint
from tests.checkpoints import make_checkpoint
from tests.fakes.late_copies import PromptCopies
from tests.requests import make_request
from tests.unit.engine_cuda.decoders import make_node
from tests.unit.engine_model.harness import make_prompt

pytestmark = pytest.mark.usefixtures("interpreted")

CPU = torch.device("cpu")


@pytest.fixture
def checks(interpreted: None) -> ModuleType:
    from tests.unit.engine_cuda import recurrent_checks

    return recurrent_checks


@pytest.mark.long
def test_cpus_and_gpus_go_on_with_what_the_other_has_left(checks: ModuleType) -> None:
    checks.check_cpus_and_gpus_go_on_with_what_the_other_has_left(CPU)


@pytest.mark.long
def test_bits_depend_on_no_batch_and_no_chunk(checks: ModuleType) -> None:
    checks.check_bits_depend_on_no_batch_and_no_chunk(CPU)


@pytest.mark.long
def test_a_state_is_kept_behind_any_row(checks: ModuleType) -> None:
    checks.check_a_state_is_kept_behind_any_row(CPU)


def test_a_model_has_the_tokens_of_the_torch_decoder(interpreted: None, tmp_path: Path) -> None:
    """Behind a layer with a state there is one with attention, which is gated."""
    from pdserve.engine.cuda.attention.triton_attention import TritonAttention
    from pdserve.engine.cuda.copies.staging import Staging
    from pdserve.engine.cuda.decoder import CudaDecoder

    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "num_attention_heads": 2}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 1}
    sizes = {"num_hidden_layers": 2, **heads, **experts}
    checkpoint = resolve_checkpoint(str(make_checkpoint(tmp_path, "qwen3_next", **sizes)))
    config = load_model_config(checkpoint)
    plan = ModelPlan.of(config, form=FLOAT32)
    weights = load_torch_weights(checkpoint, plan, ActivationDtype.FLOAT32, CPU)
    models: list[Decoder] = [
        TorchDecoder(config, weights, ReferenceAttention()),
        CudaDecoder(config, weights, TritonAttention(), Staging(PromptCopies()), None),
    ]
    outputs = []
    for model in models:
        batch = [make_request(make_prompt(n, seed=n)) for n in (1, 5)]
        make_node(model).generate(batch, 2, chunk=4)
        outputs.append([request.output_token_ids for request in batch])
    assert outputs[0] == outputs[1]
