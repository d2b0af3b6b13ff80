"""What a request's own parameters change and permit in this step, besides its grammar."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdserve.engine.grammar import TokenMasks
from pdserve.engine.grammar.masks import WORD_BITS
from pdserve.engine.request import Ahead, Request
from pdserve.engine.row_edits import RowEdits


def edits_of(request: Request, eos_token_ids: frozenset[int]) -> RowEdits:
    """Return what changes the request's logits in this step; made with its first step."""
    if isinstance(request, Ahead):
        return edits_of(request.base, eos_token_ids).further(request.output_token_ids)
    edits = request.edits
    if edits is None:
        edits = RowEdits(request.sampling, request.prompt_token_ids, eos_token_ids)
        request.edits = edits
    edits.follow(request.output_token_ids)
    return edits


def edited_rows(
    requests: Sequence[Request], eos_token_ids: frozenset[int]
) -> list[tuple[int, RowEdits]]:
    """Return the rows whose logits change before a token is chosen, and what changes them."""
    return [
        (row, edits_of(request, eos_token_ids))
        for row, request in enumerate(requests)
        for s in (request.sampling,)
        if s.logit_bias
        or s.bad_words
        or s.repetition_penalty != 1.0
        or s.frequency_penalty
        or s.presence_penalty
        or (s.min_tokens and len(request.output_token_ids) < s.min_tokens)
    ]


def with_allowed_ids(
    masks: TokenMasks | None, requests: Sequence[Request], vocab_size: int
) -> TokenMasks | None:
    """Return the masks, narrowed to `allowed_token_ids` in the rows of requests that have them.

    Args:
        masks: of the rows that have a grammar.
        requests: one per row.
        vocab_size: number of logits in a row.
    """
    limited = [row for row, request in enumerate(requests) if request.sampling.allowed_token_ids]
    if not limited:
        return masks
    rows = limited if masks is None else sorted({*limited, *masks.rows})
    place = {row: i for i, row in enumerate(rows)}
    bits = np.full((len(rows), -(-vocab_size // WORD_BITS)), -1, dtype=np.int32)
    if masks is not None:
        bits[[place[row] for row in masks.rows]] = masks.words_of(vocab_size)
    for row in limited:
        request = requests[row]
        if request.allowed_words is None:
            request.allowed_words = _words(request.sampling.allowed_token_ids, vocab_size)
        bits[place[row]] &= request.allowed_words
    return TokenMasks(rows, bits)


def _words(token_ids: list[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """Return the mask of these tokens: [ceil(vocab_size / 32)]. Ids without a logit are ignored."""
    ids = np.array(token_ids)
    is_allowed = np.zeros(-(-vocab_size // WORD_BITS) * WORD_BITS, dtype=bool)
    is_allowed[ids[ids < vocab_size]] = True
    return np.packbits(is_allowed, bitorder="little").view(np.int32)
