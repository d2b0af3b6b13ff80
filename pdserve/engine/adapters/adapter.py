"""An adapter in memory: what it adds to the products of a model's matrices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pdserve.engine.plan.matrix import Matrix
from pdserve.engine.ranks.shard import Shard
from pdserve.shared.errors import AdapterRefused

_ROWS: Final = 16_384  # compared at a time


@dataclass(frozen=True, slots=True)
class LowRank:
    """B (A x) + bias, which is added to a product. The adapter's scale is in B and bias already.

    What the model's own matrix gives is multiplied by `factors` before, its bias is not.
    """

    a: Tensor  # [rank, in_features] float32; tensors that are fused in its file share it
    b: Tensor  # [out_features, rank] float32
    bias: Tensor | None = None  # [out_features] float32
    factors: Tensor | None = None  # [out_features] float32


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """Rows of the embedding, or of the output matrix, that it has instead of the model's."""

    ids: tuple[int, ...]  # tokens, each once
    rows: Tensor  # [ids, hidden_size]

    def within(self, tokens: slice) -> TrainedTokens:
        """Return those of a range of the vocabulary."""
        own = [n for n, token in enumerate(self.ids) if tokens.start <= token < tokens.stop]
        return TrainedTokens(tuple(self.ids[n] for n in own), self.rows[own])


@dataclass(frozen=True, slots=True)
class Adapter:
    """A verified adapter, by the names of the model's plan."""

    digest: str  # of its tensors and of what in its config decides arithmetic: 32 hex digits
    parts: dict[str, LowRank]  # by Part.name, but for the vocabulary
    embedding: LowRank | None = None  # A is [rank, vocab_size], B is [hidden_size, rank]
    head: LowRank | None = None  # of the output matrix, tied or not
    own_embedding: Tensor | None = None  # [vocab_size, hidden_size], instead of the model's
    own_head: Tensor | None = None  # likewise; the model's two may be tied nevertheless
    trained_embedding: TrainedTokens | None = None
    trained_head: TrainedTokens | None = None  # if the two are tied, the same
    # aLoRA: it computes from where these tokens stand for the last time in a prompt; (): all.
    invocation: tuple[int, ...] = ()
    # What PEFT saves beside an adapted vocabulary: the embedding that it was trained with.
    base_embedding: Tensor | None = None
    num_bytes: int = 0  # of its tensors

    def check_base(self, embedding: Tensor, first_token: int = 0) -> None:
        """Raises AdapterRefused: it was trained with another embedding than this one of the model.

        It may have been saved in another type, so values may differ by a rounding. Of a rank,
        `embedding` has the tokens from `first_token` on.
        """
        if self.base_embedding is None:
            return
        saved = self.base_embedding[first_token : first_token + len(embedding)]
        for first in range(0, len(embedding), _ROWS):
            rows = slice(first, first + _ROWS)
            own, other = saved[rows].float(), embedding[rows].cpu().float()
            if not torch.allclose(own, other, rtol=1e-2, atol=1e-4):
                raise AdapterRefused(
                    f"adapter {self.digest} was trained with another model: the embedding that it "
                    "was saved with is not this model's"
                )

    def of(self, matrix: Matrix, shard: Shard) -> Iterator[tuple[slice, LowRank]]:
        """Yield what it adds to a planned matrix: each with its rows of that.

        Args:
            matrix: but for the output matrix.
            shard: the rank that has it: of what is added up over the ranks, the first has biases.
        """
        for part, rows, (cut, columns) in matrix.placed():
            if (own := self.parts.get(part.name)) is None:
                continue
            is_summed = len(matrix.columns) < own.a.shape[1]
            has_bias = own.bias is not None and not (is_summed and shard.rank)
            bias = own.bias[cut] if own.bias is not None and has_bias else None
            factors = None if own.factors is None else own.factors[cut]
            yield rows, LowRank(own.a[:, columns], own.b[cut], bias, factors)
