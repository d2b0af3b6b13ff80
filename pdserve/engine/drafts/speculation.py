"""Gives the streams of a step drafts, as many as are expected to gain time.

A draft makes its step longer, for all of its streams, and may save one. Which drafts are computed
is decided for each step: by how likely they are right, and by the predicted time of the step with
them. So at low load there are many, and at high load none, without anybody setting it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heapreplace
from operator import itemgetter
from typing import Final, NamedTuple

from pdserve.engine.drafts.grammars import DraftMasks, ForcedTokens
from pdserve.engine.drafts.guesses import Guesses, SourceCounts
from pdserve.engine.drafts.row_times import RowTimes
from pdserve.engine.drafts.source import Source
from pdserve.engine.drafts.work import DraftWork
from pdserve.engine.interface import shape_of
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request, Scheduled
from pdserve.measured.perf_model import StepShape
from pdserve.measured.samples import DraftTally
from pdserve.protocol import DraftState

StepTime = Callable[[StepShape], float]  # in seconds, as predicted

MOST_OF_STREAM: Final = 16  # drafts; more are hardly ever right
MOST_OF_STEP: Final = 128  # to be considered
_WORTH: Final = 1.03  # times as many tokens a second as without drafts, or there are none
_GIVEN_UP: Final = 0.9  # of the best rate: further drafts are less likely still
_NUM_TOKENS: Final = itemgetter(1)  # of a row
_SHARED: Final = 1.2  # times as long a step may take for drafts of others than all its streams


class Proposal(NamedTuple):
    """The best of a stream's drafts; see `guesses.Best`."""

    request: Request
    tokens: Sequence[int]
    likely: float  # that one of them is right, if those before it are
    right: float  # how many are expected to be
    mask_s: float  # time of the mask that each of them needs
    chance: float = 1.0  # that what is before them is right


class Speculation:
    """Implements `core.Speculate`, for the engine that decodes."""

    def __init__(
        self, pool: BlockPool, step_s: StepTime, most_rows: int, sources: Sequence[Source] = ()
    ) -> None:
        """`most_rows`: for whose logits a step has memory."""
        self.counts: dict[str, SourceCounts] = {}
        self.works: dict[str, DraftWork] = {}  # of sources that compute their drafts
        self._sources: list[Source] = []
        for source in sources:
            self.add(source)
        # Charges a request's payer for the time of a step, in seconds, that its drafts add.
        self.charge: Callable[[Request, float], None] = lambda request, seconds: None
        self._masks: DraftMasks | None = None
        self._pool = pool
        self._times = RowTimes(step_s)
        self._most_rows = most_rows

    def states(self) -> list[DraftState]:
        """What has come of each source's drafts."""
        states = []
        for name, one in self.counts.items():
            kv = self.works[name].kv if name in self.works else (0, 0)
            states.append(DraftState(name, one.drafted, one.accepted, *kv))
        return states

    def tally(self) -> DraftTally:
        """What has come of all drafts."""
        tally = DraftTally()
        for one in self.counts.values():
            tally = tally.plus(DraftTally(one.tried, one.drafted, one.accepted, one.wrong))
        return tally

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from the time of a step that has been computed."""
        if shape.is_decode:
            self._times.observe(shape, seconds)

    def add(self, source: Source, work: DraftWork | None = None) -> None:
        """Have further drafts for the streams to come, and know what it takes to compute them."""
        self._sources.append(source)
        self.counts[source.name] = SourceCounts()
        if work is not None:
            self.works[source.name] = work

    def follow(self, masks: DraftMasks, *, forces: bool = True) -> None:
        """Have drafts for answers with a grammar, too, those included that it `forces`."""
        self._masks = masks
        if forces:
            self.add(ForcedTokens(masks))

    def __call__(self, rows: list[Scheduled]) -> list[Scheduled]:
        """Return the rows of a plan with drafts, which their requests have then.

        Only steps of decodes get any: others are as long as their prompts already.
        """
        if max(map(_NUM_TOKENS, rows), default=2) > 1:
            return rows
        proposals = self._proposals(rows)
        if not proposals or not _may_gain(rows, proposals):
            return rows
        shape = shape_of(rows)
        return self._with_drafts(rows, shape, proposals) if shape.is_decode else rows

    def awaits(self, rows: Sequence[Scheduled], gap_s: float) -> bool:
        """Whether the step behind one that runs is worth being planned with its tokens.

        A device goes on without them otherwise, and then no stream has drafts. What is guessed now
        begins with the token that the step computes.

        Args:
            rows: that are left of the step that runs, which has decodes only, and no drafts.
            gap_s: for how long the device waits then.
        """
        behind = [
            one._replace(tokens=one.tokens[1:], right=one.right - one.likely, chance=one.likely)
            for one in self._proposals(rows)
            if len(one.tokens) > 1
        ]
        if not behind or not _may_gain(rows, behind):
            return False
        if any(self._worth(rows, shape_of(rows), behind, gap_s)):
            return True
        for one in behind:
            if one.request.guesses is not None:
                one.request.guesses.untried()
        return False

    def _proposals(self, rows: Sequence[Scheduled]) -> list[Proposal]:
        """Return the best of each stream's drafts, where there are any."""
        proposals: list[Proposal] = []
        for request, _ in rows:  # as long as nothing is found, no function of Python's is called
            num_output, guesses = len(request.output_token_ids), request.guesses
            if not num_output:
                continue
            if guesses is None:
                guesses = Guesses(request, self._sources, self.counts, self._masks)
                request.guesses = guesses
            # Each draft is followed by a token, so the last one that is allowed is none.
            most = request.sampling.max_tokens - num_output - 1
            if most <= 0 or request.leg_token_limit is not None:
                continue
            if most > MOST_OF_STREAM:
                most = MOST_OF_STREAM
            is_found = False
            for asked in guesses.asked:
                tokens, sureness = asked.propose(request, most)
                if tokens:
                    guesses.found(request, asked, tokens, sureness)
                    is_found = True
            if is_found and (best := guesses.taken(request)) is not None:
                proposals.append(Proposal(request, *best))
        return proposals

    def _with_drafts(
        self, rows: list[Scheduled], shape: StepShape, proposals: Sequence[Proposal]
    ) -> list[Scheduled]:
        taken = self._worth(rows, shape, proposals)
        num_spare = self._pool.num_free - len(rows)  # each stream may need a block of its own
        for (request, tokens, _, _, mask_s, _), num_taken in zip(proposals, taken, strict=True):
            assert request.guesses is not None, "it has proposed something"
            if not num_taken:  # as of all streams, under load: no further call is made
                request.guesses.untried()
                continue
            num_drafts, num_blocks = self._with_room(request, num_taken, num_spare)
            if mask_s and self._masks is not None:
                num_drafts = self._masks.afford(request, num_drafts)
            if not num_drafts:
                request.guesses.untried()
                continue
            if num_blocks:
                request.block_table += self._pool.allocate(num_blocks)
                num_spare -= num_blocks
            request.draft = tokens[:num_drafts]
        if not any(taken):
            return rows
        self._charge(shape, proposals)
        return [
            Scheduled(row.request, 1 + len(row.request.draft)) if row.request.draft else row
            for row in rows
        ]

    def _charge(self, shape: StepShape, proposals: Sequence[Proposal]) -> None:
        """Drafts are paid for by whose they are, right or wrong; the policy charges the rest."""
        drafted = [one for one in proposals if one.request.draft]
        number = sum([len(one.request.draft) for one in drafted])
        if not number:
            return
        further_s = max(0.0, self._times.step_s(_larger(shape, number)) - self._times.step_s(shape))
        for one in drafted:
            draft_s = further_s / number + one.mask_s
            self.charge(one.request, len(one.request.draft) * draft_s)

    def _worth(
        self,
        rows: Sequence[Scheduled],
        shape: StepShape,
        proposals: Sequence[Proposal],
        gap_s: float = 0.0,
    ) -> list[int]:
        """Return how many drafts of each proposal are worth their time.

        Args:
            rows: of the step without drafts.
            shape: of these.
            proposals: of at most one for each row.
            gap_s: that a step with drafts takes longer, however many.
        """
        # The next draft of each stream, likeliest first: that it is right, and so are those before.
        nexts = [(-one.chance * one.likely, 1, stream) for stream, one in enumerate(proposals)]
        heapify(nexts)
        tokens = float(len(rows))
        plain_s = self._times.step_s(shape)
        best, num_taken = tokens / plain_s * _WORTH, 0
        limit_s = min(row.request.targets.tpot_s for row in rows)
        if len(proposals) < len(rows):  # who gains nothing does not pay for who does
            limit_s = min(limit_s, _SHARED * plain_s)
        most = max(0, min(MOST_OF_STEP, self._most_rows - len(rows)))
        further_s, considered = gap_s, list[int]()  # the stream of each
        while nexts and len(considered) < most:
            chance, place, stream = nexts[0]
            one = proposals[stream]
            if place < len(one.tokens):
                heapreplace(nexts, (chance * one.likely, place + 1, stream))
            else:
                heappop(nexts)
            considered.append(stream)
            tokens -= chance
            further_s += one.mask_s
            step_s = self._times.step_s(_larger(shape, len(considered))) + further_s
            if step_s > limit_s or tokens / step_s < best * _GIVEN_UP:
                break
            if tokens / step_s > best:
                best, num_taken = tokens / step_s, len(considered)
        taken = [0] * len(proposals)
        for stream in considered[:num_taken]:
            taken[stream] += 1
        return taken

    def _with_room(self, request: Request, num_drafts: int, num_spare: int) -> tuple[int, int]:
        """Return how many drafts there are blocks for, and how many blocks to allocate for them."""
        pool, table = self._pool, request.block_table
        missing = pool.blocks_for(request.num_tokens + num_drafts) - len(table)
        if missing <= max(0, num_spare):
            return num_drafts, max(0, missing)
        return min(num_drafts, pool.tokens_in(len(table)) - request.num_tokens), 0


def _may_gain(rows: Sequence[Scheduled], proposals: Sequence[Proposal]) -> bool:
    """Whether drafts could be worth it if they took no time; else note that none was tried."""
    if sum([one.right for one in proposals]) >= (_WORTH - 1) * len(rows):
        return True
    for one in proposals:
        if one.request.guesses is not None:
            one.request.guesses.untried()
    return False


def _larger(shape: StepShape, number: int) -> StepShape:
    """Return the shape with so many drafts: made for each that is considered, so made quickly."""
    num_tokens, num_sampled = shape.num_tokens + number, shape.num_sampled + number
    return StepShape(num_tokens, num_sampled, 0, shape.decode_context + number)
