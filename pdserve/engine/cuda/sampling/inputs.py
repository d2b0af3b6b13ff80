"""What sampling on a GPU needs of the host, as tensors that travel with the step's batch.

Only what some draw of the step uses is there: a greedy step has two small tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.engine.grammar import TokenMasks
from pdserve.engine.row_edits import Ids
from pdserve.engine.sampling.interface import Draws
from pdserve.engine.sampling.sampler import edited_rows, num_ranked, pack_params, with_allowed_ids


class EditKind(IntEnum):
    """How a logit is changed. Those that have an amount for each token come first."""

    BIAS = 0  # plus an amount
    PENALTY = 1  # less an amount
    FORBID = 2  # to -inf
    REPETITION = 3  # divided or multiplied by the draw's factor


class MaskInputs(NamedTuple):
    """Which tokens some draws may choose."""

    of_draw: Tensor  # [num_draws] int32: the mask of each; -1: none
    words: Tensor  # [num_masks, num_words] int32


class EditInputs(NamedTuple):
    """Changes to single logits."""

    starts: Tensor  # [4, num_draws + 1] int32: where the tokens of a kind and draw begin in `ids`
    ids: Tensor  # [num_edits] int32, no token twice for a kind and draw
    amounts: Tensor  # float32, of the first ids: those of biases and penalties
    factors: Tensor  # [num_draws] float32: the repetition penalties


class RankInputs(NamedTuple):
    """Which draws want log-probabilities."""

    ranked: Tensor  # [num_ranked, 2] int32: the draw, and how many of its likeliest tokens it wants
    listed_starts: Tensor  # [num_ranked + 1] int32: where the tokens to look up begin
    listed_ids: Tensor  # [num_listed] int32


class SamplingInputs(NamedTuple):
    """All of it, on the host or on the GPU."""

    rows: Tensor  # [num_draws] int32, of the logits
    params: Tensor  # [num_draws, 7] int64: the bits of sampling/sampler.py
    masks: MaskInputs | None
    edits: EditInputs | None
    ranks: RankInputs | None

    def tensors(self) -> list[Tensor]:
        """Return all tensors, one after the other."""
        parts = [part for part in (self.masks, self.edits, self.ranks) if part is not None]
        return [self.rows, self.params, *(tensor for part in parts for tensor in part)]

    def moved(self, tensors: Sequence[Tensor]) -> SamplingInputs:
        """Return the same made of other tensors, which are in the order of `tensors`."""
        there = iter(tensors)
        return SamplingInputs(
            rows=next(there),
            params=next(there),
            masks=None if self.masks is None else MaskInputs(*islice(there, len(self.masks))),
            edits=None if self.edits is None else EditInputs(*islice(there, len(self.edits))),
            ranks=None if self.ranks is None else RankInputs(*islice(there, len(self.ranks))),
        )


def lay_out(draws: Draws, vocab_size: int) -> tuple[SamplingInputs, list[EditKind]]:
    """Return the inputs of a step's sampling, on the host, and the kinds of edits that occur."""
    requests = draws.requests
    rows = range(len(requests)) if draws.rows is None else draws.rows
    params = np.frombuffer(bytearray(pack_params(requests)), np.int64)
    masks = with_allowed_ids(draws.masks, requests, vocab_size)
    edits, kinds = _edits(draws)
    inputs = SamplingInputs(
        rows=_ints(rows),
        params=torch.from_numpy(params.reshape(len(requests), -1)),
        masks=None if masks is None else _masks(masks, len(requests), vocab_size),
        edits=edits,
        ranks=_ranks(draws, vocab_size),
    )
    return inputs, kinds


def _masks(masks: TokenMasks, num_draws: int, vocab_size: int) -> MaskInputs:
    of_draw = np.full(num_draws, -1, np.int32)
    of_draw[masks.rows] = range(len(masks.rows))
    return MaskInputs(torch.from_numpy(of_draw), torch.from_numpy(masks.words_of(vocab_size)))


def _edits(draws: Draws) -> tuple[EditInputs | None, list[EditKind]]:
    num_draws = len(draws.requests)
    ids: list[list[Ids]] = [[] for _ in EditKind]
    amounts: list[list[npt.NDArray[np.float32]]] = [[] for _ in EditKind]
    counts = np.zeros((len(EditKind), num_draws + 1), np.int32)  # [kind, draw + 1]
    factors = np.ones(num_draws, np.float32)
    for draw, changes in edited_rows(draws.requests, draws.eos_token_ids):
        request = draws.requests[draw]
        penalised, penalties = changes.output
        factors[draw] = request.sampling.repetition_penalty
        amounts[EditKind.BIAS].append(changes.bias_amounts)
        amounts[EditKind.PENALTY].append(penalties)
        for kind, of_kind in (
            (EditKind.BIAS, changes.bias_ids),
            (EditKind.PENALTY, penalised),
            (EditKind.FORBID, changes.forbidden(request.output_token_ids)),
            (EditKind.REPETITION, changes.seen),
        ):
            ids[kind].append(of_kind)
            counts[kind, draw + 1] = len(of_kind)
    kinds = [kind for kind in EditKind if counts[kind].any()]
    if not kinds:
        return None, kinds
    starts = counts.cumsum(axis=1, dtype=np.int32)
    starts[1:] += starts[:-1, -1].cumsum(dtype=np.int32)[:, None]  # behind the kinds before
    edits = EditInputs(
        torch.from_numpy(starts),
        torch.from_numpy(np.concatenate([part for parts in ids for part in parts])),
        torch.from_numpy(np.concatenate([part for parts in amounts for part in parts])),
        torch.from_numpy(factors),
    )
    return edits, kinds


def _ranks(draws: Draws, vocab_size: int) -> RankInputs | None:
    ranked, starts, listed = [], [0], []
    for draw, request in enumerate(draws.requests):
        num_top = num_ranked(request.sampling)
        if num_top < 0:
            continue
        ranked.append((draw, min(num_top, vocab_size)))
        listed += [i for i in request.sampling.logprob_token_ids if i < vocab_size]
        starts.append(len(listed))
    if not ranked:
        return None
    return RankInputs(_ints(ranked), _ints(starts), _ints(listed))


def _ints(values: Sequence[int] | Sequence[tuple[int, int]]) -> Tensor:
    return torch.from_numpy(np.array(values, np.int32))
