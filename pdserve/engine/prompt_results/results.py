"""What a prompt gives besides KV: log-probabilities of its tokens, an embedding, first tokens.

The logits at a token give the log-probability of the next token, so the logits of nearly every row
of a chunk are needed. At once they would be [num_tokens, vocab_size]: too much memory for a long
chunk and a large vocabulary. So the step is computed in consecutive parts, each with as many such
rows as the memory limit allows. Each part is an ordinary batch: a chunk that is split continues in
the next part, over the KV that the previous part has written.

An embedding pools the final states of tokens, that is the hidden states after the last norm. The
last token's state is always computed, so prompts with last-token pooling reuse cached KV like any
other. Mean pooling needs the states of all tokens, and states are not cached with the KV: such a
prompt can only skip tokens whose states are already in its sum.

A request's siblings, the other answers to its prompt, are not rows of a step. Their first tokens
are sampled from the logits of the request's row, so the model computes nothing twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from pdserve.engine.prompt_results.work import PromptWork
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.engine.sampling.limits import unusable
from pdserve.engine.sampling.logprobs import token_logprobs
from pdserve.engine.steps.batch import Batch, WantedStates
from pdserve.engine.steps.parts import rows_within
from pdserve.protocol import TokenLogprobs

LOGITS_BYTES = 32 << 20  # limit for one part; computing log-probabilities takes as much again


@dataclass(frozen=True, slots=True)
class _Place:
    """A row that is used to score the next prompt token."""

    request: Request
    work: PromptWork  # the request's
    position: int  # of the row's token; the token after it is scored


@dataclass(frozen=True, slots=True)
class ScoredPart:
    """A range of a step's rows."""

    batch: Batch  # its `sampled_rows` are the scored rows and the sampled rows
    is_last: bool
    _places: list[_Place | None]  # by sampled row; None if a token is sampled from the row

    def score(self, logits: Tensor) -> Tensor:
        """Store the scores in their requests; return the other rows: [num_sampled, vocab_size].

        Args:
            logits: [num rows, vocab_size] float32, of this part's batch.

        Raises:
            UnusableLogits: the logits of a request are not finite.
        """
        scored = [(row, place) for row, place in enumerate(self._places) if place is not None]
        if scored:
            places = [place for _, place in scored]
            found = _scores(logits[[row for row, _ in scored]], places)
            for place, logprobs in zip(places, found, strict=True):
                if place.position == len(place.work.logprobs):
                    place.work.logprobs.append(logprobs)
        # This makes a copy, because the logits are only valid until the next part is computed.
        return logits[[row for row, place in enumerate(self._places) if place is None]]


def is_scored(rows: Sequence[Scheduled]) -> bool:
    """Whether any row belongs to a prompt with requested scores that are not known yet."""
    return any(row.request.prompt_work is not None and scored_positions(row) for row in rows)


def scored_positions(row: Scheduled) -> range:
    """Positions in the chunk whose logits give log-probabilities of the next prompt tokens."""
    request, begin = row.request, row.request.num_computed_tokens
    if request.prompt_work is None or request.output_token_ids:
        return range(0)
    return request.prompt_work.scored_positions(begin, begin + row.num_tokens)


def scored_parts(
    rows: Sequence[Scheduled], batch: Batch, vocab_size: int, logits_bytes: int
) -> Iterator[ScoredPart]:
    """Yield the parts of a step, to be computed in this order.

    Args:
        rows: the step's plan.
        batch: the plan as tensors, on the host.
        vocab_size: of the model.
        logits_bytes: limit on float32 logits per part; a part has at least one row regardless.
    """
    places = _places(rows, batch)  # row of the batch |-> place to score; None if sampled from
    wanted = sorted(places)
    requests = dict(zip(batch.sampled_rows.tolist(), batch.sampled_requests, strict=True))
    num_rows = max(1, logits_bytes // (4 * vocab_size))
    begin = 0
    for first in range(0, len(wanted), num_rows):
        here = wanted[first : first + num_rows]
        is_last = first + num_rows >= len(wanted)
        end = len(batch.token_ids) if is_last else here[-1] + 1
        owners = [place.request if (place := places[row]) else requests[row] for row in here]
        part = dataclasses.replace(
            rows_within(batch, begin, end),
            sampled_rows=torch.tensor(here, dtype=torch.int64) - begin,
            sampled_requests=owners,
            cargo=None,  # sampling begins behind the last part, and brings its own
        )
        yield ScoredPart(part, is_last, [places[row] for row in here])
        begin = end


def _places(rows: Sequence[Scheduled], batch: Batch) -> dict[int, _Place | None]:
    starts: list[int] = batch.attention.query_start.tolist()
    places: dict[int, _Place | None] = {}
    for start, row in zip(starts, rows, strict=False):
        request = row.request
        for position in scored_positions(row):
            assert request.prompt_work is not None, "it has positions to score"
            at = start + position - request.num_computed_tokens
            places[at] = _Place(request, request.prompt_work, position)
    return places | dict.fromkeys(batch.sampled_rows.tolist())


def _scores(logits: Tensor, places: Sequence[_Place]) -> list[TokenLogprobs]:
    """Return the log-probabilities of each place's next token; logits: [num_scored, vocab_size]."""
    next_ids = [place.request.prompt_token_ids[place.position + 1] for place in places]
    num_top = [place.request.sampling.prompt_logprobs or 0 for place in places]
    is_usable = logits.amax(dim=-1).isfinite().tolist()
    if not all(is_usable):
        damaged = {
            p.request: None for p, usable in zip(places, is_usable, strict=True) if not usable
        }
        raise unusable(list(damaged))
    chosen = logits.gather(1, torch.tensor(next_ids, device=logits.device)[:, None])
    # Summed as bytes into int32; a sum of booleans is not vectorized.
    is_likelier = (logits > chosen).view(torch.uint8)
    ranks: list[int] = is_likelier.sum(dim=-1, dtype=torch.int32).tolist()
    return [
        msgspec.structs.replace(found, rank=rank + 1)
        for found, rank in zip(token_logprobs(logits, next_ids, num_top), ranks, strict=True)
    ]


def wanted_states(rows: Sequence[Scheduled], batch: Batch, hidden_size: int) -> WantedStates | None:
    """Return the states that the step's requests pool, or None if there are none.

    Args:
        rows: the step's plan.
        batch: the plan as tensors, on the host.
        hidden_size: of the model.
    """
    starts: list[int] = batch.attention.query_start.tolist()
    wanted = [
        start + position - row.request.num_computed_tokens
        for start, row in zip(starts, rows, strict=False)
        for position in _pooled_positions(row)
    ]
    if not wanted:
        return None
    return WantedStates(torch.tensor(wanted), torch.empty(len(wanted), hidden_size))


def pool(rows: Sequence[Scheduled], states: WantedStates) -> None:
    """Add the states to the sums in their requests.

    Raises:
        UnusableLogits: the states of a request are not finite.
    """
    found = states.out.numpy()  # [num_states, hidden_size]
    damaged = []
    begin = 0
    for row in rows:
        num_states = len(_pooled_positions(row))
        if num_states == 0:
            continue
        # In float64, so that the rounded result does not depend on how the prompt is chunked.
        total = found[begin : begin + num_states].sum(axis=0, dtype=np.float64)
        begin += num_states
        work = row.request.prompt_work
        assert work is not None, "it has positions to pool"
        if np.isfinite(total).all():
            work.add_states(total, num_states)
        else:
            damaged.append(row.request)
    if damaged:
        raise unusable(damaged)


def _pooled_positions(row: Scheduled) -> range:
    """Positions in the chunk whose final states are the next ones to pool for the embedding."""
    work, begin = row.request.prompt_work, row.request.num_computed_tokens
    return range(0) if work is None else work.pooled_positions(begin, begin + row.num_tokens)


_SIBLINGS = attrgetter("siblings")  # evaluated for each row of each step, so not in Python


def fan_out(requests: Sequence[Request]) -> tuple[Sequence[Request], list[int] | None]:
    """Return all answers to sample: of each request its own, then its siblings'.

    Also returns for each answer the row of logits, as an index into `requests`; None if there are
    no siblings.
    """
    if not any(map(_SIBLINGS, requests)):
        return requests, None
    owners = [row for row, request in enumerate(requests) for _ in request.answers]
    return [answer for request in requests for answer in request.answers], owners


def fan_in(sampled: Sequence[SampledToken], requests: Sequence[Request]) -> Sequence[SampledToken]:
    """Undo `fan_out`: return one token per request, with the tokens of its siblings attached."""
    if len(sampled) == len(requests):
        return sampled
    tokens = iter(sampled)
    return [
        replace(token, siblings=tuple(islice(tokens, len(request.siblings))))
        for request in requests
        for token in islice(tokens, 1)
    ]
