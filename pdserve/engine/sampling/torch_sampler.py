"""Sampling by torch: for GPUs, and the reference of csrc/sampling."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pdserve.engine.grammar import TokenMasks
from pdserve.engine.grammar.masks import mask_logits
from pdserve.engine.request import Ahead, Request, SampledToken
from pdserve.engine.sampling.adjust import adjust_logits
from pdserve.engine.sampling.draw import draw_tokens
from pdserve.engine.sampling.limits import GREEDY_BELOW, nothing_to_choose
from pdserve.engine.sampling.logprobs import listed_logprobs, token_logprobs
from pdserve.protocol import TokenLogprobs


def sample_by_torch(
    logits: Tensor,
    requests: Sequence[Request],
    eos_token_ids: frozenset[int],
    masks: TokenMasks | None = None,
) -> list[SampledToken]:
    """See `sample_natively`; works on any device."""
    adjusted = adjust_logits(mask_logits(logits, masks), requests, eos_token_ids)
    likeliest = adjusted.argmax(dim=-1)  # a NaN if there is one; ties go to the lowest id
    peaks = adjusted.gather(1, likeliest[:, None])[:, 0]
    is_missing = _missing(peaks, logits, requests)
    token_ids: list[int] = likeliest.masked_fill(is_missing, -1).tolist()
    rows = [
        i
        for i, request in enumerate(requests)
        if token_ids[i] >= 0 and request.sampling.temperature >= GREEDY_BELOW
    ]
    if rows:
        drawn = draw_tokens(adjusted[rows], peaks[rows], [requests[i] for i in rows])
        for i, token_id in zip(rows, drawn, strict=True):
            token_ids[i] = token_id
    logprobs = _logprobs(logits, requests, token_ids)
    return [SampledToken(token_id, logprobs.get(i)) for i, token_id in enumerate(token_ids)]


def _missing(peaks: Tensor, logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Return [num_requests] bool: where no token can be chosen, nor need be, behind a draft."""
    is_missing = ~peaks.isfinite()
    rows = [
        row for row in is_missing.nonzero()[:, 0].tolist() if not isinstance(requests[row], Ahead)
    ]
    if rows:
        raise nothing_to_choose(logits[rows], [requests[row] for row in rows])
    return is_missing


def _logprobs(
    logits: Tensor, requests: Sequence[Request], token_ids: list[int]
) -> dict[int, TokenLogprobs]:
    """Return row |-> log-probabilities, for the rows that requested them."""
    num_top = {
        i: request.sampling.logprobs
        for i, request in enumerate(requests)
        if request.sampling.logprobs is not None and token_ids[i] >= 0
    }
    if not num_top:
        return {}
    rows = list(num_top)
    ranked = token_logprobs(logits[rows], [token_ids[i] for i in rows], list(num_top.values()))
    result = dict(zip(rows, ranked, strict=True))
    for row in rows:
        if listed_ids := requests[row].sampling.logprob_token_ids:
            result[row] = listed_logprobs(logits[row], token_ids[row], listed_ids)
    return result
