"""A row's sampling parameters in the binary layout that kernels read, on CPUs and GPUs."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from pdserve.engine.request import Request
from pdserve.engine.sampling.limits import GREEDY_BELOW
from pdserve.protocol import SamplingParams

# temperature, top_p, min_p, top_k, seed, position, logprobs: csrc/sampling/row.h: RowParams.
_PARAMS: Final = struct.Struct("=dddqQQq")
_GREEDY: Final = _PARAMS.pack(0.0, 1.0, 0.0, 0, 0, 0, -1)


def pack_params(requests: Sequence[Request]) -> bytes:
    """Return the parameters of each request's next token, one after the other."""
    # The common case is inlined: a call per row would be half of a step's sampling time.
    return b"".join(
        [
            _GREEDY if s.temperature < GREEDY_BELOW and s.logprobs is None else _packed(request)
            for request in requests
            for s in (request.sampling,)
        ]
    )


def num_ranked(sampling: SamplingParams) -> int:
    """Return how many of the likeliest tokens to find; -1: no log-probabilities at all."""
    if sampling.logprobs is None:
        return -1
    return 0 if sampling.logprob_token_ids else sampling.logprobs


def _packed(request: Request) -> bytes:
    sampling = request.sampling
    return _PARAMS.pack(
        0.0 if sampling.temperature < GREEDY_BELOW else sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.top_k,
        sampling.seed % 2**64,
        request.num_tokens,
        num_ranked(sampling),
    )
