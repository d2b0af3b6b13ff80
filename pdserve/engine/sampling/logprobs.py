"""Log-probabilities of the chosen tokens and of the most likely ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.protocol import TokenLogprobs


def listed_logprobs(logits: Tensor, token_id: int, listed_ids: Sequence[int]) -> TokenLogprobs:
    """Return the log-probabilities of the chosen token and of a list of others, without ranking.

    Args:
        logits: [vocab_size] float32, as computed by the model.
        token_id: the chosen token; it is listed first.
        listed_ids: ids without a logit are left out.
    """
    ids = [i for i in dict.fromkeys([token_id, *listed_ids]) if i < len(logits)]
    values: list[float] = torch.log_softmax(logits, dim=-1)[ids].tolist()
    return TokenLogprobs(chosen=values[0], top_ids=ids, top_logprobs=values)


def listed_beside(
    logits: npt.NDArray[np.float32], token_id: int, chosen: float, listed_ids: Sequence[int]
) -> TokenLogprobs:
    """Return what `listed_logprobs` does, from `chosen`, the chosen token's log-probability.

    All differ from their logits by the same amount, so there is no need to go over the vocabulary.
    """
    ids = [i for i in dict.fromkeys([token_id, *listed_ids]) if i < len(logits)]
    shift = chosen - float(logits[token_id])
    values: list[float] = (logits[ids].astype(np.float64) + shift).tolist()
    return TokenLogprobs(chosen=values[0], top_ids=ids, top_logprobs=values)


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Return the log-probabilities to report for each row.

    Args:
        logits: [num_rows, vocab_size] float32, as computed by the model.
        token_ids: the chosen token of each row.
        num_top: per row, how many of the most likely tokens to list; ties are listed by lowest id.
    """
    distributions = torch.log_softmax(logits, dim=-1)
    chosen = distributions.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    chosen_logprobs: list[float] = chosen[:, 0].tolist()
    # One more than needed, to see whether the list is cut off within a tie.
    width = min(max(num_top) + 1, logits.shape[1])
    ranked = distributions.topk(width, dim=-1)
    all_ids, all_values = ranked.indices.tolist(), ranked.values.tolist()
    result = []
    for row, count in enumerate(num_top):
        ids, values = all_ids[row], all_values[row]
        if 0 < count < width and values[count - 1] == values[count]:
            is_candidate = distributions[row] >= values[count - 1]
            ids = is_candidate.nonzero()[:, 0].tolist()
            values = distributions[row][is_candidate].tolist()
        top = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))[:count]
        result.append(
            TokenLogprobs(
                chosen=chosen_logprobs[row],
                top_ids=[token_id for token_id, _ in top],
                top_logprobs=[value for _, value in top],
            )
        )
    return result
