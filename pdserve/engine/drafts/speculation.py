"""Gives the streams of a step drafts, as many as are expected to gain time.

A draft makes its step longer, for all of its streams, and may save one. Which drafts are computed
is decided for each step: by how likely they are right, and by the predicted time of the step with
them. So at low load there are many, and at high load none, without anybody setting it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from pdserve.engine.drafts.guesses import Guesses, SourceCounts
from pdserve.engine.drafts.source import Source
from pdserve.engine.interface import shape_of
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request, Scheduled
from pdserve.measured.perf_model import StepShape

StepTime = Callable[[StepShape], float]  # in seconds, as predicted

MOST_OF_STREAM: Final = 16  # drafts; more are hardly ever right
MOST_OF_STEP: Final = 128  # to be considered
_WORTH: Final = 1.03  # times as many tokens a second as without drafts, or there are none
_GIVEN_UP: Final = 0.9  # of the best rate: further drafts are less likely still
_SHARED: Final = 1.2  # times as long a step may take for drafts of others than all its streams


class Speculation:
    """Implements `core.Speculate`, for the engine that decodes."""

    def __init__(
        self, pool: BlockPool, step_s: StepTime, most_rows: int, sources: Sequence[Source]
    ) -> None:
        """`most_rows`: for whose logits a step has memory."""
        self.counts = {source.name: SourceCounts() for source in sources}
        self._sources = sources
        self._pool = pool
        self._step_s = step_s
        self._most_rows = most_rows

    def __call__(self, rows: list[Scheduled]) -> list[Scheduled]:
        """Return the rows of a plan with drafts, which their requests have then.

        Only steps of decodes get any: others are as long as their prompts already.
        """
        shape = shape_of(rows)
        if not shape.is_decode:
            return rows
        for request in [r for r, _ in rows if r.guesses is None and r.grammar is None]:
            request.guesses = Guesses(request, self._sources, self.counts)
        # Each draft is followed by a token, so the last one that is allowed is none.
        proposals = [
            (request, *proposal)
            for request, _ in rows
            if (guesses := request.guesses) is not None
            and request.leg_token_limit is None
            and (
                proposal := guesses.propose(
                    request,
                    min(
                        MOST_OF_STREAM,
                        request.sampling.max_tokens - len(request.output_token_ids) - 1,
                    ),
                )
            )[0]
        ]
        return self._with_drafts(rows, shape, proposals) if proposals else rows

    def _with_drafts(
        self,
        rows: list[Scheduled],
        shape: StepShape,
        proposals: Sequence[tuple[Request, Sequence[int], float]],
    ) -> list[Scheduled]:
        drafts = [(len(tokens), likely) for _, tokens, likely in proposals]
        taken = self._worth(rows, shape, drafts)
        num_spare = self._pool.num_free - len(rows)  # each stream may need a block of its own
        for (request, tokens, _), num_taken in zip(proposals, taken, strict=True):
            assert request.guesses is not None, "it has proposed something"
            num_drafts, num_blocks = self._with_room(request, num_taken, num_spare)
            if not num_drafts:
                request.guesses.untried()
                continue
            if num_blocks:
                request.block_table += self._pool.allocate(num_blocks)
                num_spare -= num_blocks
            request.draft = tokens[:num_drafts]
        return [
            Scheduled(row.request, 1 + len(row.request.draft)) if row.request.draft else row
            for row in rows
        ]

    def _worth(
        self, rows: Sequence[Scheduled], shape: StepShape, drafts: Sequence[tuple[int, float]]
    ) -> list[int]:
        """Return how many drafts of each stream are worth their time.

        Args:
            rows: of the step without drafts.
            shape: of these.
            drafts: number of each stream's, and how likely each of them is right.
        """
        likely = [
            (right**place, place, stream)  # that this draft is right, and so are those before it
            for stream, (number, right) in enumerate(drafts)
            for place in range(1, number + 1)
        ]
        likely.sort(key=lambda one: (-one[0], one[1]))
        tokens = float(len(rows))
        plain_s = self._step_s(shape)
        best, num_taken = tokens / plain_s * _WORTH, 0
        limit_s = min(row.request.targets.tpot_s for row in rows)
        if len(drafts) < len(rows):  # who gains nothing does not pay for who does
            limit_s = min(limit_s, _SHARED * plain_s)
        most = max(0, min(MOST_OF_STEP, self._most_rows - len(rows)))
        for number, (chance, _, _) in enumerate(likely[:most], start=1):
            tokens += chance
            step_s = self._step_s(_larger(shape, number))
            if step_s > limit_s or tokens / step_s < best * _GIVEN_UP:
                break
            if tokens / step_s > best:
                best, num_taken = tokens / step_s, number
        taken = [0] * len(drafts)
        for _, _, stream in likely[:num_taken]:
            taken[stream] += 1
        return taken

    def _with_room(self, request: Request, num_drafts: int, num_spare: int) -> tuple[int, int]:
        """Return how many drafts there are blocks for, and how many blocks to allocate for them."""
        pool, table = self._pool, request.block_table
        missing = pool.blocks_for(request.num_tokens + num_drafts) - len(table)
        if missing <= max(0, num_spare):
            return num_drafts, max(0, missing)
        return min(num_drafts, pool.tokens_in(len(table)) - request.num_tokens), 0


def _larger(shape: StepShape, number: int) -> StepShape:
    return replace(
        shape,
        num_tokens=shape.num_tokens + number,
        num_sampled=shape.num_sampled + number,
        decode_context=shape.decode_context + number,
    )
