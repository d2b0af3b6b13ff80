"""Torch's sampling on a GPU against the CPU's: the same tokens. Skipped where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from pdserve.engine.sampling import sample
from tests.kernels.sampling_cases import EOS, FILTERS, make_row
from tests.requests import make_request

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize("vocab_size", [100, 151_936])
@pytest.mark.parametrize("spread", [0.1, 2.0, 6.0])
def test_a_gpu_draws_the_cpus_tokens(spread: float, vocab_size: int) -> None:
    filters = FILTERS * 4
    logits = torch.stack([make_row(vocab_size, seed=i, spread=spread) for i in range(len(filters))])
    requests = [
        make_request([0], [1], frequency_penalty=0.3, **({"temperature": 1.0, "seed": i} | chosen))
        for i, chosen in enumerate(filters)
    ]
    on_gpu = sample(logits.to("cuda"), requests, EOS)
    assert on_gpu == sample(logits, requests, EOS)
