"""What comes down of a step's sampling, in one piece of memory, and what is made of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.cuda.copies.packing import Packing
from pdserve.engine.cuda.sampling.inputs import RankInputs, SamplingInputs
from pdserve.engine.request import Request
from pdserve.protocol import TokenLogprobs


class Results(NamedTuple):
    """Written by the kernels, and copied to the host as they are."""

    token_ids: Tensor  # [num_draws] int32; negative where no token can be chosen
    summaries: Tensor  # [num_ranked, 3] float64: peak, sum of exponentials, the chosen logit
    top_ids: Tensor  # [num_ranked, width] int32, of the likeliest tokens, in no order
    top_logits: Tensor  # [num_ranked, width] float32
    listed_logits: Tensor  # [num_listed] float32, of `RankInputs.listed_ids`


def packing_of(inputs: SamplingInputs) -> Packing:
    """Return where the results are. `inputs` are those on the host."""
    ranks, num_ranked, width, num_listed = inputs.ranks, 0, 0, 0
    if ranks is not None:
        num_ranked, num_listed = len(ranks.ranked), len(ranks.listed_ids)
        width = int(ranks.ranked.numpy()[:, 1].max())
    return Packing(
        [
            ((len(inputs.rows),), torch.int32),
            ((num_ranked, 3), torch.float64),
            ((num_ranked, width), torch.int32),
            ((num_ranked, width), torch.float32),
            ((num_listed,), torch.float32),
        ]
    )


def logprobs_of(
    results: Results, ranks: RankInputs, requests: Sequence[Request]
) -> Iterator[tuple[int, TokenLogprobs]]:
    """Yield the draws that want log-probabilities, and got a token, with theirs.

    All are what a logit is less the same number, so that there is no pass over the vocabulary.

    Args:
        results: on the host.
        ranks: on the host.
        requests: [num_draws].
    """
    token_ids, summaries, top_ids, top_logits, listed = (part.numpy() for part in results)
    starts: list[int] = ranks.listed_starts.numpy().tolist()
    listed_ids = ranks.listed_ids.numpy()
    for index, (draw, num_top) in enumerate(ranks.ranked.numpy().tolist()):
        if token_ids[draw] < 0:
            continue  # nothing was written
        peak, exp_sum, chosen = summaries[index].tolist()
        here = slice(starts[index], starts[index + 1])
        if requests[draw].sampling.logprob_token_ids:
            looked_up = zip(listed_ids[here].tolist(), listed[here].tolist(), strict=True)
            pairs = list({int(token_ids[draw]): chosen, **dict(looked_up)}.items())
        else:
            found = zip(top_ids[index].tolist(), top_logits[index].tolist(), strict=True)
            pairs = sorted(list(found)[:num_top], key=lambda pair: (-pair[1], pair[0]))
        shift = peak + math.log(exp_sum)
        top = np.array([logit - shift for _, logit in pairs], np.float32)
        yield (
            draw,
            TokenLogprobs(
                chosen=float(np.float32(chosen - shift)),
                top_ids=[token_id for token_id, _ in pairs],
                top_logprobs=top.tolist(),
            ),
        )
