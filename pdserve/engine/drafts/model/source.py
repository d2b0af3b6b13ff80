"""Decides what the draft model computes before a step, by the time that it is expected to save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

from pdserve.engine.drafts.guesses import Shares
from pdserve.engine.drafts.model.depth import MOST, SHARED, best_depth
from pdserve.engine.drafts.model.draft_model import DraftModel, DraftSteps
from pdserve.engine.drafts.model.stream import SURENESS, DraftedStream
from pdserve.engine.drafts.work import DraftWork
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.measured.perf_model import StepShape

_READY: Final = 16  # tokens that a stream may be ahead of the draft model, to have drafts now
_LEAST_SLICE: Final = 16  # tokens
_REFUSED_OFTEN: Final = 10  # refusals after which what is known of all streams fades a little
_NEWEST: Final = 0.05  # weight of the newest in a moving average
_DEARER: Final = 2.0  # times as many of its drafts must be right as of others', which cost no steps


# How many drafts which streams are to have; slices of prompts.
_Choice: TypeAlias = tuple[list[tuple[DraftedStream, int]], list[Scheduled]]


class ModelSource:
    """Implements `Source`, and `core.Draft`."""

    name = "model"

    def __init__(
        self,
        model: DraftModel,
        queues: Queues,
        step_s: Callable[[StepShape], float],
        token_budget: int,
    ) -> None:
        """
        Args:
            model: that drafts.
            queues: whose streams.
            step_s: predicted time of a step without drafts, or with some.
            token_budget: most tokens of a slice of a prompt.
        """
        self.work = DraftWork(model.pool, model.block_bytes)
        self._model = model
        self._queues = queues
        self._step_s = step_s
        self._token_budget = token_budget
        self._streams: dict[Request, DraftedStream] = {}
        self._shares = Shares()
        self._num_refused = 0
        self._lag_s = 0.0  # moving average
        self._last: DraftSteps | None = None
        self._has_failed = False

    def drafter(self, request: Request) -> DraftedStream | None:
        """As Source.drafter."""
        model = self._model
        stream = DraftedStream(request, model.vocab_size, model.max_model_len, self._shares)
        if stream.is_over or self._has_failed:
            return None
        self._streams[request] = stream
        return stream

    def ended(self, request: Request) -> None:
        """As Source.ended: its blocks are freed with the next plan, when nothing is computed."""

    def plan(self) -> DraftSteps | None:
        """Return what to compute before the next step is planned; None: nothing is worth it."""
        self._learn()
        known = self._streams.values()
        self._drop([s for s in known if s.is_over or s.request.is_done or self._has_failed])
        choice = self._choice()
        if choice is not None:
            wanted, slices = choice
            self._last = DraftSteps(self._model, slices, wanted, self._model.now())
        return self._last

    def awaits(self, rows: Sequence[Scheduled], gap_s: float) -> bool:
        """As core.Awaits: whether there is anything to compute behind the step that runs."""
        return self._choice(gap_s) is not None

    # ---- what it decides by --------------------------------------------------------------------

    def _choice(self, gap_s: float = 0.0) -> _Choice | None:
        """Return what is worth its time, and `gap_s` more; None: nothing is."""
        # Prompts are not held up: as long as there are some, nobody has drafts.
        decoding = self._queues.decoding
        if not self._streams or self._queues.waiting or len(decoding) < len(self._queues.running):
            return None
        streams = [stream for request in decoding if (stream := self._candidate(request))]
        if not streams:
            return None
        shape = StepShape(
            num_tokens=len(decoding),
            num_sampled=len(decoding),
            decode_context=sum(request.num_computed_tokens + 1 for request in decoding),
        )
        ready = [stream for stream in streams if stream.num_behind <= _READY]
        limit_s = min(request.targets.tpot_s for request in decoding)
        depth = self._best_depth(shape, ready, limit_s, gap_s)
        slices: list[Scheduled] = []
        if len(ready) < len(streams):
            slices = self._slices(shape, streams, limit_s, gap_s)
        wanted = []
        if depth:
            wanted = [(s, number) for s in ready if (number := self._with_room(s, depth))]
        elif not slices:
            self._refused(ready)
        return (wanted, slices) if wanted or slices else None

    def _candidate(self, request: Request) -> DraftedStream | None:
        """The stream of a request, if nobody else's drafts are as good."""
        stream, guesses = self._streams.get(request), request.guesses
        if stream is None or guesses is None or request.leg_token_limit is not None:
            return None
        stream.follow()
        if stream.is_over or _num_left(request) < 1 or not stream.room_for(1):
            return None
        if stream.drafts:
            return stream
        best = guesses.propose(request, MOST)
        others = 0.0 if best is None else _right(best.likely, len(best.tokens))
        is_dearer = _DEARER * others > _right(stream.likely, MOST)
        return None if is_dearer else stream

    def _best_depth(
        self, shape: StepShape, streams: Sequence[DraftedStream], limit_s: float, gap_s: float
    ) -> int:
        likely = [stream.likely for stream in streams]
        draft_s = partial(self._draft_s, streams, gap_s)
        return best_depth(shape, likely, self._step_s, draft_s, limit_s).num_drafts

    def _draft_s(self, streams: Sequence[DraftedStream], gap_s: float, num_drafts: int) -> float:
        """Predict the time of drafts of streams that the model knows."""
        context = sum(stream.request.num_tokens for stream in streams)
        model_s = num_drafts * self._model.perf.decode_s(len(streams), context)
        return model_s + 2 * self._lag_s + gap_s  # to the thread and back

    def _slices(
        self, shape: StepShape, streams: Sequence[DraftedStream], limit_s: float, gap_s: float
    ) -> list[Scheduled]:
        """Return a slice of the prompt that has the least left, if its drafts will be worth it."""
        behind = [stream for stream in streams if stream.num_behind > _READY]
        stream = min(behind, key=lambda stream: stream.num_behind)
        likely = [stream.likely for stream in streams]
        draft_s = partial(self._draft_s, streams, gap_s)
        depth, gain = best_depth(shape, likely, self._step_s, draft_s, limit_s)
        plain_s, perf = self._step_s(shape), self._model.perf
        num_left = min(self._queues.headroom.remaining(stream.request), _num_left(stream.request))
        num_known = stream.shadow.num_computed_tokens
        cost_s = perf.prefill_s(stream.num_behind, num_known, self._token_budget)
        if not depth or num_left * plain_s * (1 - 1 / gain) < cost_s:
            return []
        most_s = min((SHARED - 1) * plain_s, limit_s - plain_s - gap_s)
        num_tokens = min(self._token_budget, stream.num_behind)
        while (
            num_tokens > _LEAST_SLICE and perf.prefill_s(num_tokens, num_known, num_tokens) > most_s
        ):
            num_tokens //= 2
        if not self._has_blocks(stream, num_known + num_tokens):
            return []
        return [Scheduled(stream.shadow, num_tokens)]

    def _refused(self, streams: Sequence[DraftedStream]) -> None:
        """Trust a little less in what is known: nothing is learnt while nothing is tried."""
        for stream in streams:
            stream.untried()
        self._num_refused += 1
        if self._num_refused % _REFUSED_OFTEN == 0:
            self._shares.forget(SURENESS)

    def _learn(self) -> None:
        """Note what the last steps of the model took."""
        if self._last is not None:
            for shape, seconds in self._last.times:
                self._model.perf.observe(shape, seconds, self._queues.clock.now())
                self.work.seconds += seconds
                self.work.tokens += shape.num_tokens
            self._lag_s += _NEWEST * (self._last.lag_s - self._lag_s)
            self._has_failed = self._last.has_failed
            self._last = None

    # ---- blocks --------------------------------------------------------------------------------

    def _with_room(self, stream: DraftedStream, num_drafts: int) -> int:
        """Return how many drafts the stream can have, and give it blocks for them."""
        number = stream.room_for(min(num_drafts, _num_left(stream.request)))
        if number and self._has_blocks(stream, stream.request.num_tokens + number):
            return number
        return 0

    def _has_blocks(self, stream: DraftedStream, num_tokens: int) -> bool:
        """Give the stream blocks for so many tokens; or it gives its own back to the others."""
        pool, table = self._model.pool, stream.shadow.block_table
        missing = pool.blocks_for(num_tokens) - len(table)
        if missing > pool.num_free:
            self._drop([stream])
            return False
        table += pool.allocate(max(0, missing))
        return True

    def _drop(self, streams: Sequence[DraftedStream]) -> None:
        """Have no more drafts for these."""
        for stream in streams:
            self._model.pool.release(stream.shadow.block_table)
            stream.end()
            del self._streams[stream.request]


def _right(likely: float, number: int) -> float:
    """How many of so many drafts are expected to be right."""
    return sum(likely**place for place in range(1, number + 1))


def _num_left(request: Request) -> int:
    """How many drafts a step may verify: each is followed by a token."""
    return request.sampling.max_tokens - len(request.output_token_ids) - 1
