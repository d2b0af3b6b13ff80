"""EAGLE-3 heads on a GPU: rows of real graphs, and drafts in the model's dtype. Skipped without."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from pdserve.engine.attention.reference import ReferenceAttention
from pdserve.engine.cuda.attention.triton_attention import TritonAttention
from pdserve.engine.cuda.capture.recorder import CudaRecorder
from pdserve.engine.cuda.copies.staging import CudaCopies, Staging
from pdserve.engine.cuda.decoder import CudaDecoder
from pdserve.engine.drafts.heads.eagle3 import Eagle3Head, HeadPlan, parse_eagle3
from pdserve.engine.drafts.heads.head import HeadRows
from pdserve.engine.models.config import load_model_config
from pdserve.engine.models.torch_decoder import TorchDecoder
from pdserve.engine.plan.forms import ActivationDtype
from pdserve.engine.request import Scheduled
from pdserve.engine.steps.taps import TapPlan
from pdserve.model_files.checkpoint import resolve_checkpoint
from tests.checkpoints import make_checkpoint
from tests.heads import make_eagle3
from tests.requests import make_request
from tests.unit.engine_cuda.decoders import make_node, random_weights
from tests.unit.engine_model.harness import make_prompt

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TAPS = (0, 1, 1)


def test_steps_copy_out_what_is_before_the_layers(tmp_path: Path) -> None:
    """A step with prompts by pieces, then decodes by graphs."""
    path = make_checkpoint(tmp_path, "llama", max_position_embeddings=512)
    config = load_model_config(resolve_checkpoint(str(path)))
    found: list[list[np.ndarray]] = []
    for decoder in (
        CudaDecoder(
            config,
            random_weights(config, torch.float32, CUDA),
            TritonAttention(),
            Staging(CudaCopies(CUDA)),
            CudaRecorder(CUDA),
            (1, 2, 4),
            piece_sizes=(32,),
            tap_layers=TAPS,
        ),
        TorchDecoder(config, random_weights(config, torch.float32, CPU), ReferenceAttention()),
    ):
        node = make_node(decoder)
        node.runner.taps = TapPlan("a head", TAPS)
        requests = [make_request(make_prompt(n, n), request_id=str(n)) for n in (9, 4)]
        found.append([])
        for _ in range(4):
            node.step([Scheduled(one, one.num_uncomputed_tokens) for one in requests])
            found[-1] += [one.tapped.rows for one in requests if one.tapped is not None]
    assert len(found[0]) == len(found[1]) == 8
    for here, there in zip(*found, strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_drafts_what_it_drafts_on_cpus(tmp_path: Path, dtype: str) -> None:
    """In bfloat16, up to the rounding of what it goes on from."""
    path = make_eagle3(tmp_path / "head")
    values = json.loads((path / "config.json").read_text())
    on_cpu = HeadPlan(path, parse_eagle3(values, "made"), 20, "made")
    on_gpu = replace(on_cpu, device=CUDA, dtype=ActivationDtype(dtype))
    rows, tokens = torch.randn(9, 3 * 64), [7, 8, 9, 10]
    found = []
    for plan in (on_gpu, on_cpu):
        head = Eagle3Head.load(plan)
        states = head.entered(rows)
        parts = [
            HeadRows(tokens, states[:4], 60, 62, [3, 1]),
            HeadRows(tokens[:1], states[4:5], 30, 0, [2]),
        ]
        found.append([(token, state.float().cpu()) for token, state in head.step(parts)])
    exact = dtype == "float32"
    for (token, states), (expected, of_cpu) in zip(*found, strict=True):
        assert token == expected or not exact
        torch.testing.assert_close(
            states, of_cpu, rtol=1e-3 if exact else 0.1, atol=1e-3 if exact else 0.2
        )
