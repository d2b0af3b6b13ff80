"""Samples one token for each row of logits.

The order of operations is that of vLLM: mask tokens that the grammar, `allowed_token_ids`,
`min_tokens` or `bad_words` forbid, then bias and penalties; then, unless greedy, temperature,
min-p, top-k, top-p, and a draw. Log-probabilities are those of the model, before any of these.
Equal logits give exactly the same token in any batch, with any number of threads, natively or by
torch; log-probabilities may differ by rounding between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pdserve.engine.grammar import TokenMasks
from pdserve.engine.request import Request, SampledToken
from pdserve.engine.sampling.interface import Draws
from pdserve.engine.sampling.native import sample_natively
from pdserve.engine.sampling.permitted import with_allowed_ids
from pdserve.engine.sampling.torch_sampler import sample_by_torch


def sample(
    logits: Tensor,
    requests: Sequence[Request],
    eos_token_ids: frozenset[int],
    masks: TokenMasks | None = None,
) -> list[SampledToken]:
    """Choose the next token of each request: natively on a CPU, by torch elsewhere.

    Args:
        logits: [num_requests, vocab_size] float32, as computed by the model; not modified.
        requests: one per row; the new token is the next one after their tokens so far.
        eos_token_ids: of the model, for `min_tokens`.
        masks: tokens that the grammars allow, for the rows that have one.

    Returns:
        One token per request, in order.

    Raises:
        UnusableLogits, NoTokenLeft: for some requests no token can be chosen. No request gets a
            token then.
    """
    masks = with_allowed_ids(masks, requests, logits.shape[1])
    if logits.device.type == "cpu":
        return sample_natively(logits, requests, eos_token_ids, masks=masks)
    return sample_by_torch(logits, requests, eos_token_ids, masks)


class PlainSampler:
    """Sampler that begins only once the logits are there, by `sample`."""

    def begin(self, draws: Draws) -> PlainSampling:
        """Prepare the sampling of a step whose logits are not computed yet."""
        return PlainSampling(draws)


@dataclass(slots=True)
class PlainSampling:
    """The sampling of one step, done when its tokens are asked for."""

    draws: Draws
    cargo: None = None
    sampled: None = None
    logits: Tensor | None = None

    def launch(self, logits: Tensor) -> None:
        """Keep the logits; nothing is chosen yet."""
        self.logits = logits

    def tokens(self) -> list[SampledToken]:
        """Wait for the tokens: one per draw, in order."""
        draws, logits = self.draws, self.logits
        assert logits is not None, "it was launched"
        if draws.rows is not None:
            logits = logits[draws.rows]
        return sample(logits, draws.requests, draws.eos_token_ids, draws.masks)
