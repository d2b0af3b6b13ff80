"""The same engine code on a GPU, against the CPU. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.requests import make_request
from tests.unit.engine_model.harness import Node, make_prompt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

CUDA = torch.device("cuda")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_gpu_gives_the_cpus_tokens(tmp_path: Path, family: str) -> None:
    """Chunked prefill, then decode, of several requests in one batch; greedy, float32."""
    path = make_checkpoint(tmp_path, family)
    outputs = []
    for device in (torch.device("cpu"), CUDA):
        node = Node.load(path, device=device)
        requests = [make_request(make_prompt(n, seed=n), request_id=str(n)) for n in (1, 17, 90)]
        node.generate(requests, num_tokens=12, chunk=13)
        outputs.append([request.output_token_ids for request in requests])
    assert outputs[0] == outputs[1]
