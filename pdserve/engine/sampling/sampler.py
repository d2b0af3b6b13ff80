"""One token for each row of logits.

The order of the steps is vLLM's: hold back what a grammar forbids and endings, bias, penalties;
then, unless greedy, temperature, min-p, top-k, top-p, and one draw. Log-probabilities are those of
the model, before any of it. From the same logits a row's token is the same, bit by bit, in whatever
batch it is sampled, by however many threads, natively or by torch; log-probabilities may differ by
rounding between the two.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pdserve.engine.grammar import TokenMasks
from pdserve.engine.request import Request, SampledToken
from pdserve.engine.sampling.native import sample_natively
from pdserve.engine.sampling.torch_sampler import sample_by_torch


def sample(
    logits: Tensor,
    requests: Sequence[Request],
    eos_token_ids: frozenset[int],
    masks: TokenMasks | None = None,
) -> list[SampledToken]:
    """Choose the next token of each request: natively on a CPU, by torch elsewhere.

    Args:
        logits: [num_requests, vocab_size] float32, as the model gave them; left as they are.
        requests: whose; their tokens so far end where the new ones go.
        eos_token_ids: of the model, for `min_tokens`.
        masks: tokens that may come, where not all may.

    Returns:
        One token per request, in order.

    Raises:
        UnusableLogits, NoTokenLeft: for some requests there is nothing to choose from. No token was
            chosen.
    """
    if logits.device.type == "cpu":
        return sample_natively(logits, requests, eos_token_ids, masks=masks)
    return sample_by_torch(logits, requests, eos_token_ids, masks)
