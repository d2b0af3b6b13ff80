"""Launches the kernels that choose tokens, on checked arguments."""

from __future__ import annotations

from typing import Final

import torch
import triton
from torch import Tensor

from pdserve.engine.cuda.sampling.choice_kernels import choose_tokens
from pdserve.engine.cuda.sampling.edit_kernels import edit_rows, mask_rows
from pdserve.engine.cuda.sampling.inputs import EditInputs, EditKind, MaskInputs, RankInputs
from pdserve.engine.cuda.sampling.rank_kernels import rank_logits
from pdserve.engine.cuda.sampling.results import Results

DAMAGED: Final = -1  # instead of a token, where the model's output is no distribution
_MOST_LANES: Final = 4096
_FEW_LANES: Final = 512  # what is searched again and again, or is not a whole row
# In the order of csrc/sampling/edits.cpp.
_ORDER: Final = (EditKind.FORBID, EditKind.BIAS, EditKind.REPETITION, EditKind.PENALTY)
# Weights are rounded after every operation, as on a CPU.
_EXACT: Final = {"enable_fp_fusion": False, "num_stages": 1}


def change(
    logits: Tensor,
    rows: Tensor,
    masks: MaskInputs | None,
    edits: EditInputs | None,
    kinds: list[EditKind],
) -> Tensor:
    """Return the draws' logits with their masks and edits: [num_draws, vocab_size] float32.

    Args:
        logits: [num_rows, vocab_size] float32, contiguous rows; not modified.
        rows: [num_draws] int32.
        masks, edits: of the draws.
        kinds: the kinds of edits that there are.
    """
    num_draws, vocab_size = len(rows), logits.shape[1]
    changed = torch.empty((num_draws, vocab_size), dtype=torch.float32, device=logits.device)
    block = _lanes(vocab_size)
    mask_rows[(num_draws, triton.cdiv(vocab_size, block))](
        logits,
        logits.stride(0),
        rows,
        rows if masks is None else masks.of_draw,
        rows if masks is None else masks.words,
        0 if masks is None else masks.words.shape[1],
        changed,
        vocab_size,
        HAS_MASKS=masks is not None,
        BLOCK=block,
        num_warps=8,
        **_EXACT,
    )
    if edits is None:
        return changed
    for kind in _ORDER:
        if kind in kinds:
            edit_rows[(num_draws,)](
                changed,
                edits.starts,
                edits.ids,
                edits.amounts,
                edits.factors,
                int(kind),
                vocab_size,
                BLOCK=_FEW_LANES,
                num_warps=4,
                **_EXACT,
            )
    return changed


def choose(logits: Tensor, rows: Tensor | None, params: Tensor, token_ids: Tensor) -> None:
    """Choose a token for each draw; `DAMAGED` where a logit is NaN or +inf, -2 if all are -inf.

    Args:
        logits: [num_rows, vocab_size] float32, contiguous rows.
        rows: [num_draws] int32, of the logits; None: of each draw its own.
        params: [num_draws, 7] int64.
        token_ids: [num_draws] int32, written.
    """
    _check_logits(logits)
    num_draws, vocab_size = len(params), logits.shape[1]
    block = _lanes(vocab_size)
    # No row of it is touched where the draw is greedy, or without filters.
    candidates = _working_memory(num_draws, vocab_size, block, logits.device)
    choose_tokens[(num_draws,)](
        logits,
        logits.stride(0),
        params if rows is None else rows,
        params,
        candidates,
        candidates.stride(0),
        token_ids,
        vocab_size,
        HAS_ROWS=rows is not None,
        BLOCK=block,
        SEARCH_BLOCK=min(block, _FEW_LANES),
        num_warps=16,
        **_EXACT,
    )


def rank(logits: Tensor, rows: Tensor, ranks: RankInputs, results: Results) -> None:
    """Find what the log-probabilities follow from.

    Args:
        logits: [num_rows, vocab_size] float32, as the model computed them.
        rows: [num_draws] int32, of the logits.
        ranks: what is wanted of which draws.
        results: with the chosen tokens; all else is written.
    """
    _check_logits(logits)
    num_ranked, vocab_size = len(ranks.ranked), logits.shape[1]
    block = _lanes(vocab_size)
    keys, key_ids = (
        _working_memory(num_ranked, vocab_size, block, logits.device) for _ in range(2)
    )
    rank_logits[(num_ranked,)](
        logits,
        logits.stride(0),
        rows,
        results.token_ids,
        ranks.ranked,
        ranks.listed_starts,
        ranks.listed_ids,
        keys,
        key_ids,
        keys.stride(0),
        results.summaries,
        results.top_ids,
        results.top_logits,
        results.top_ids.shape[1],
        results.listed_logits,
        vocab_size,
        BLOCK=block,
        SEARCH_BLOCK=min(block, _FEW_LANES),
        num_warps=16,
        **_EXACT,
    )


def _check_logits(logits: Tensor) -> None:
    if logits.dtype != torch.float32 or logits.ndim != 2 or logits.stride(1) != 1:
        raise TypeError("logits must be float32, in contiguous rows")


def _lanes(vocab_size: int) -> int:
    """Return the number of logits that a program looks at at a time."""
    return min(_MOST_LANES, int(triton.next_power_of_2(vocab_size)))


def _working_memory(num_rows: int, vocab_size: int, block: int, device: torch.device) -> Tensor:
    return torch.empty((num_rows, max(vocab_size, block)), dtype=torch.int32, device=device)
