"""Samples one token for each row of logits.

The order of operations is that of vLLM: mask tokens that the grammar, `allowed_token_ids`,
`min_tokens` or `bad_words` forbid, then bias and penalties; then, unless greedy, temperature,
min-p, top-k, top-p, and a draw. Log-probabilities are those of the model, before any of these.
Equal logits give exactly the same token in any batch, with any number of threads, natively or by
torch; log-probabilities may differ by rounding between the two.

On CPUs the requests become rows of numbers for one native call (csrc/sampling), which checks all
arguments.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pdserve import _native
from pdserve.engine.grammar import TokenMasks
from pdserve.engine.grammar.masks import WORD_BITS
from pdserve.engine.interface import OthersSampled
from pdserve.engine.request import Ahead, Request, SampledToken
from pdserve.engine.row_edits import RowEdits
from pdserve.engine.sampling.adjust import edits_of
from pdserve.engine.sampling.interface import Draws
from pdserve.engine.sampling.limits import GREEDY_BELOW, nothing_to_choose
from pdserve.engine.sampling.logprobs import listed_beside
from pdserve.engine.sampling.torch_sampler import sample_by_torch
from pdserve.protocol import SamplingParams, TokenLogprobs
from pdserve.shared.errors import NoTokenLeft


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
            token then, unless it is OthersSampled.
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


# temperature, top_p, min_p, top_k, seed, position, logprobs: csrc/sampling/row.h: RowParams.
_PARAMS: Final = struct.Struct("=dddqQQq")
_GREEDY: Final = _PARAMS.pack(0.0, 1.0, 0.0, 0, 0, 0, -1)


def pack_params(requests: Sequence[Request]) -> bytes:
    """Return the parameters of each request's next token, one after the other."""
    # The common case is inlined: a call per row would be half of a step's sampling time.
    return b"".join(
        [
            _GREEDY if s.temperature < GREEDY_BELOW and s.logprobs is None else _packed(request)
            for request in requests
            for s in (request.sampling,)
        ]
    )


def num_ranked(sampling: SamplingParams) -> int:
    """Return how many of the likeliest tokens to find; -1: no log-probabilities at all."""
    if sampling.logprobs is None:
        return -1
    return 0 if sampling.logprob_token_ids else sampling.logprobs


def _packed(request: Request) -> bytes:
    sampling = request.sampling
    return _PARAMS.pack(
        0.0 if sampling.temperature < GREEDY_BELOW else sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.top_k,
        sampling.seed % 2**64,
        request.num_tokens,
        num_ranked(sampling),
    )


def sample_natively(
    logits: Tensor,
    requests: Sequence[Request],
    eos_token_ids: frozenset[int],
    variant: str = "",
    masks: TokenMasks | None = None,
) -> list[SampledToken]:
    """See `sample`.

    Args:
        logits: [num_requests, vocab_size] float32 on the CPU; rows may be strided.
        requests: one per row.
        eos_token_ids: of the model.
        variant: a kernel build of `_native.kernel_variants()`; "" is the best this CPU can run.
        masks: tokens that are allowed, for rows in which not all are.
    """
    edits = [
        _edits(row, requests[row], changes) for row, changes in edited_rows(requests, eos_token_ids)
    ]
    token_ids, logprobs = _native.sample(
        logits,
        pack_params(requests),
        edits,
        variant,
        None if masks is None else masks.words_of(logits.shape[1]),
        [] if masks is None else masks.rows,
    )
    tokens = [SampledToken(token_id) for token_id in token_ids]
    for row, chosen, top_ids, top_logprobs in logprobs:
        if token_ids[row] < 0:
            continue
        wanted_ids = requests[row].sampling.logprob_token_ids
        if wanted_ids:
            listed = listed_beside(logits[row].numpy(), token_ids[row], chosen, wanted_ids)
        else:
            listed = TokenLogprobs(chosen=chosen, top_ids=top_ids, top_logprobs=top_logprobs)
        tokens[row] = SampledToken(token_ids[row], listed)
    if -1 in token_ids:
        # Behind a draft that may be wrong, nothing need be possible.
        missing = [
            row
            for row, token_id in enumerate(token_ids)
            if token_id < 0 and not isinstance(requests[row], Ahead)
        ]
        if missing:
            error = nothing_to_choose(logits[missing], [requests[row] for row in missing])
            if isinstance(error, NoTokenLeft):
                raise OthersSampled(error.message, error.request_ids, tokens)
            raise error
    return tokens


def _edits(row: int, request: Request, changes: RowEdits) -> _native.Edits:
    return (
        row,
        changes.forbidden(request.output_token_ids),
        changes.bias_ids,
        changes.bias_amounts,
        changes.seen,
        request.sampling.repetition_penalty,
        *changes.output,
    )


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
