"""Min-p, top-k and top-p, in that order: which tokens may be drawn, with which weights.

Each filter keeps all tokens at or above a threshold, so equally likely tokens are kept or dropped
together, and the result does not depend on the order of ties in a sort.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.protocol import SamplingParams

# Filters rarely keep more tokens than this. A row that keeps more is sorted in full, at many times
# the cost.
_WIDTH = 256


@dataclass(frozen=True, slots=True)
class TokenCandidates:
    """Tokens to draw from, for some rows of a batch."""

    rows: list[int]  # row numbers in the batch
    token_ids: Tensor | None  # [num_rows, width] ascending; None if column = token id
    weights: Tensor  # [num_rows, width] float32; 0 for dropped tokens


@dataclass(frozen=True, slots=True)
class _Limits:
    """The filters' parameters as columns [num_rows, 1]."""

    min_p: Tensor  # float32; 0 is off
    top_k: Tensor  # int64; vocab_size is off
    top_p: Tensor  # float64; 1 is off
    only_top_p: Tensor  # bool; true if the other two are off

    def take(self, rows: Tensor) -> _Limits:
        return _Limits(self.min_p[rows], self.top_k[rows], self.top_p[rows], self.only_top_p[rows])


def filter_weights(weights: Tensor, params: Sequence[SamplingParams]) -> Iterator[TokenCandidates]:
    """Yield the candidates of all rows, grouped by width.

    Args:
        weights: [num_rows, vocab_size], from `relative_weights`.
        params: one per row.
    """
    is_filtered = [p.min_p > 0 or p.top_k > 0 or p.top_p < 1 for p in params]
    filtered = [i for i, answer in enumerate(is_filtered) if answer]
    unfiltered = [i for i, answer in enumerate(is_filtered) if not answer]
    if unfiltered:
        yield TokenCandidates(unfiltered, None, _rows(weights, unfiltered))
    if not filtered:
        return
    weights = _rows(weights, filtered)
    limits = _limits([params[i] for i in filtered], weights)
    ranked = weights.topk(min(_WIDTH, weights.shape[1]), dim=-1)
    total = weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    floor, is_narrow = _floor(ranked.values, total, limits)
    narrow = is_narrow.nonzero()[:, 0]
    if len(narrow):
        token_ids, order = ranked.indices[narrow].sort(dim=-1)
        kept = ranked.values[narrow].gather(1, order)
        kept = kept.masked_fill(kept < floor[narrow], 0.0)
        yield TokenCandidates([filtered[i] for i in narrow.tolist()], token_ids, kept)
    wide = (~is_narrow).nonzero()[:, 0]
    if len(wide):
        weights = weights[wide]
        floor, _ = _floor(
            weights.sort(dim=-1, descending=True).values, total[wide], limits.take(wide)
        )
        kept = weights.masked_fill(weights < floor, 0.0)
        yield TokenCandidates([filtered[i] for i in wide.tolist()], None, kept)


def _limits(params: Sequence[SamplingParams], weights: Tensor) -> _Limits:
    vocab_size = weights.shape[1]
    top_ks = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=weights.device)[:, None]

    min_p = column([p.min_p for p in params], torch.float32)
    top_k = column(top_ks, torch.int64)
    top_p = column([p.top_p for p in params], torch.float64)
    return _Limits(min_p, top_k, top_p, only_top_p=(min_p == 0) & (top_k == vocab_size))


def _floor(ranked: Tensor, total: Tensor, limits: _Limits) -> tuple[Tensor, Tensor]:
    """Return the smallest weight that each row keeps.

    Args:
        ranked: [num_rows, num_ranked], the largest weights in descending order.
        total: [num_rows, 1] sum of all weights of the row, including unranked ones.
        limits: of the rows.

    Returns:
        The floor [num_rows, 1], and whether it is valid [num_rows]: the ranked weights were enough
        to determine it, and contain all tokens that it keeps.
    """
    num_ranked = ranked.shape[1]
    kth = ranked.gather(1, limits.top_k.clamp(max=num_ranked) - 1)
    kth = kth.masked_fill(limits.top_k > num_ranked, 0.0)
    floor = torch.maximum(limits.min_p, kth)
    # Top-p is a share of the mass that the other two filters kept: some of the ranked weights, or
    # else the total.
    kept = ranked.masked_fill(ranked < floor, 0.0)
    mass = kept.cumsum(dim=-1, dtype=torch.float64)
    holds_all = ranked[:, -1:] < floor
    wanted = limits.top_p * torch.where(holds_all, mass[:, -1:], total)
    num_kept = ((mass - kept) < wanted).sum(dim=-1, keepdim=True).clamp(min=1)
    nucleus = ranked.gather(1, num_kept - 1)
    has_top_p = limits.top_p < 1
    floor = torch.where(has_top_p, torch.maximum(floor, nucleus), floor)
    knows_mass = holds_all | limits.only_top_p | ~has_top_p
    return floor, (knows_mass & (ranked[:, -1:] < floor))[:, 0]


def _rows(weights: Tensor, rows: list[int]) -> Tensor:
    return weights if len(rows) == len(weights) else weights[rows]
