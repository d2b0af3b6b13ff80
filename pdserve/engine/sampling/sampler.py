"""One token for each row of logits.

The order of the steps is vLLM's: hold endings back, bias, penalties; then, unless greedy,
temperature, min-p, top-k, top-p, and one draw. Log-probabilities are those of the model, before
any of it. On a CPU a row's token is the same, bit by bit, in whatever batch it is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.engine.request import Request, SampledToken
from pdserve.engine.sampling.adjust import adjust_logits
from pdserve.engine.sampling.draw import draw_tokens
from pdserve.engine.sampling.logprobs import token_logprobs
from pdserve.errors import UnusableLogits
from pdserve.protocol import TokenLogprobs

# Below it, dividing by the temperature would only lose precision.
GREEDY_BELOW = 1e-5


def sample(
    logits: Tensor, requests: Sequence[Request], eos_token_ids: frozenset[int]
) -> list[SampledToken]:
    """Choose the next token of each request.

    Args:
        logits: [num_requests, vocab_size] float32, as the model gave them; left as they are.
        requests: whose; their tokens so far end where the new ones go.
        eos_token_ids: of the model, for `min_tokens`.

    Returns:
        One token per request, in order.

    Raises:
        UnusableLogits: for some requests there is nothing to choose from. No token was chosen.
    """
    adjusted = adjust_logits(logits, requests, eos_token_ids)
    likeliest = _argmax(adjusted)
    peaks = adjusted.gather(1, likeliest[:, None])[:, 0]  # NaN or +inf if there is one in the row
    _check_finite(peaks, requests)
    token_ids: list[int] = likeliest.tolist()
    rows = [i for i, request in enumerate(requests) if request.sampling.temperature >= GREEDY_BELOW]
    if rows:
        drawn = draw_tokens(adjusted[rows], peaks[rows], [requests[i] for i in rows])
        for i, token_id in zip(rows, drawn, strict=True):
            token_ids[i] = token_id
    logprobs = _logprobs(logits, requests, token_ids)
    return [SampledToken(token_id, logprobs.get(i)) for i, token_id in enumerate(token_ids)]


def _argmax(logits: Tensor) -> Tensor:
    """[num_rows] int64: a NaN if there is one, else the lowest id among equals."""
    if logits.device.type == "cpu":
        # Over ten times as fast as torch's, which would show: greedy decoding does little else.
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _check_finite(peaks: Tensor, requests: Sequence[Request]) -> None:
    finite = peaks.isfinite()
    if not bool(finite.all()):
        unusable = [r.request_id for r, ok in zip(requests, finite.tolist(), strict=True) if not ok]
        raise UnusableLogits(
            f"the model's logits for {', '.join(unusable)} are not finite: its weights, or the KV "
            "it read, are damaged",
            unusable,
        )


def _logprobs(
    logits: Tensor, requests: Sequence[Request], token_ids: list[int]
) -> dict[int, TokenLogprobs]:
    """Row |-> log-probabilities, for the rows that asked for them."""
    num_top = {
        i: request.sampling.logprobs
        for i, request in enumerate(requests)
        if request.sampling.logprobs is not None
    }
    if not num_top:
        return {}
    rows = list(num_top)
    ranked = token_logprobs(logits[rows], [token_ids[i] for i in rows], list(num_top.values()))
    return dict(zip(rows, ranked, strict=True))
