"""Masks for some rows of a batch: one bit per token, set if the token is allowed."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Masks for the rows that have one; in other rows, any token is allowed."""

    rows: list[int]  # [num_masked] of the batch, ascending
    bits: npt.NDArray[np.int32]  # [num_masked, num_words] bit i % 32 of word i / 32: token i

    def between(self, first: int, end: int) -> TokenMasks | None:
        """Return the masks of rows first..end-1, whose numbers begin at 0; None: there are none."""
        begin, stop = bisect_left(self.rows, first), bisect_left(self.rows, end)
        if begin == stop:
            return None
        return TokenMasks([row - first for row in self.rows[begin:stop]], self.bits[begin:stop])

    def words_of(self, vocab_size: int) -> npt.NDArray[np.int32]:
        """Return the words for tokens with logits: [num_masked, ceil(vocab_size / 32)]."""
        return self.bits[:, : -(-vocab_size // WORD_BITS)]

    def allowed(self, vocab_size: int, device: torch.device) -> Tensor:
        """Return the masks as [num_masked, vocab_size] bool."""
        words = torch.from_numpy(self.words_of(vocab_size)).to(device)
        places = torch.arange(WORD_BITS, dtype=torch.int32, device=device)
        bits = (words[:, :, None] >> places) & 1  # [num_masked, num_words, 32]
        return bits.flatten(1)[:, :vocab_size].bool()


def mask_logits(logits: Tensor, masks: TokenMasks | None) -> Tensor:
    """Return [num_rows, vocab_size] with -inf for disallowed tokens; `logits` if no masks."""
    if masks is None:
        return logits
    masked = logits.clone()
    allowed = masks.allowed(logits.shape[1], logits.device)
    masked[masks.rows] = logits[masks.rows].masked_fill(~allowed, float("-inf"))
    return masked
