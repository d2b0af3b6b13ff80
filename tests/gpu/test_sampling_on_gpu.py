"""Sampling on a GPU against the CPU's: the same tokens. Skipped where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from pdserve.engine.request import Request, SampledToken
from pdserve.engine.sampling import sample
from pdserve.engine.sampling.interface import Draws
from tests.kernels.sampling_cases import EOS, FILTERS, make_row
from tests.requests import make_request

CUDA = torch.device("cuda", 0)
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
    expected = sample(logits, requests, EOS)
    assert sample(logits.to(CUDA), requests, EOS) == expected
    assert by_kernels(logits, requests) == expected


@pytest.mark.parametrize("vocab_size", [100, 151_936])
def test_a_gpu_ranks_as_the_cpu_does(vocab_size: int) -> None:
    logits = torch.stack([make_row(vocab_size, seed=i, num_levels=5000) for i in range(4)])
    requests = [make_request([0], logprobs=count, logit_bias={3: 50.0}) for count in (0, 1, 5, 20)]
    for found, wanted in zip(
        by_kernels(logits, requests), sample(logits, requests, EOS), strict=True
    ):
        assert found.token_id == wanted.token_id == 3
        assert found.logprobs is not None
        assert wanted.logprobs is not None
        assert found.logprobs.top_ids == wanted.logprobs.top_ids
        assert found.logprobs.chosen == pytest.approx(wanted.logprobs.chosen, abs=1e-5)
        top = pytest.approx(wanted.logprobs.top_logprobs, abs=1e-5)
        assert found.logprobs.top_logprobs == top


def by_kernels(logits: torch.Tensor, requests: list[Request]) -> list[SampledToken]:
    pytest.importorskip("triton")
    from pdserve.engine.cuda.copies.staging import CudaCopies, Staging
    from pdserve.engine.cuda.sampling.sampler import CudaSampler

    sampler = CudaSampler(Staging(CudaCopies(CUDA)), logits.shape[1], 64)
    sampling = sampler.begin(Draws(requests, None, None, EOS))
    sampling.launch(logits.to(CUDA))
    return sampling.tokens()
