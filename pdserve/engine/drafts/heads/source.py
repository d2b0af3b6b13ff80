"""Decides what a head drafts before a step, by the time that it is expected to save."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from pdserve.engine.drafts.guesses import Shares
from pdserve.engine.drafts.heads.head import Head
from pdserve.engine.drafts.heads.stream import HeadStream
from pdserve.engine.drafts.model.depth import best_depth
from pdserve.engine.drafts.work import DraftWork
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.engine.steps.tapped import Tapped
from pdserve.engine.steps.taps import TapPlan
from pdserve.measured.perf_model import StepShape

log = logging.getLogger(__name__)

_NEWEST: Final = 0.05  # weight of the newest in a moving average
_REFUSED_OFTEN: Final = 10  # refusals after which what is known of all streams fades a little


@dataclass(slots=True)
class HeadDrafts:
    """What a head computes before a step, in the thread that computes steps."""

    head: Head
    wanted: Sequence[tuple[HeadStream, int]]  # how many drafts each stream is to have
    now: Callable[[], float]
    seconds: float = 0.0  # that it took
    num_tokens: int = 0  # that were computed
    has_failed: bool = False

    def __call__(self) -> None:
        """Compute it. What fails costs drafts, and nothing else."""
        started_s = self.now()
        try:
            self._draft()
        except Exception:
            log.exception("the head fails: there are no drafts of it any more")
            self.has_failed = True
        self.seconds = self.now() - started_s

    def _draft(self) -> None:
        parts = [(stream, stream.begin()) for stream, _ in self.wanted]
        for number in range(1, 1 + max(most for _, most in self.wanted)):
            self.num_tokens += sum(len(rows.tokens) for _, rows in parts)
            layer = min(number, self.head.num_layers) - 1
            found = self.head.step([rows for _, rows in parts], layer)
            for (stream, _), (token, states) in zip(parts, found, strict=True):
                stream.drafted(token, states)
            parts = [(stream, stream.behind()) for stream, most in self.wanted if number < most]


class HeadSource:
    """Implements `Source`, and `core.Draft`."""

    name = "model"  # that speculation.model names

    def __init__(
        self,
        head: Head,
        runner: ModelRunner,
        queues: Queues,
        step_s: Callable[[StepShape], float],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            head: of the runner's model.
            runner: computes the steps, and from now on copies rows out for the head.
            queues: whose streams.
            step_s: predicted time of a step without drafts, or with some.
            now: a clock.
        """
        self.work = DraftWork(head.pool, head.block_bytes)
        self._head = head
        self._runner = runner
        self._queues = queues
        self._step_s = step_s
        self._now = now
        self._streams: dict[Request, HeadStream] = {}
        self._ended: list[HeadStream] = []
        self._shares = Shares()
        self._token_s = 0.0
        self._last: HeadDrafts | None = None
        self._num_refused = 0
        self._has_failed = False
        runner.taps = TapPlan(head.name, head.taps)

    def drafter(self, request: Request) -> HeadStream | None:
        """As Source.drafter."""
        if self._has_failed:
            return None
        return self._streams.setdefault(request, HeadStream(request, self._head, self._shares))

    def ended(self, request: Request) -> None:
        """As Source.ended: what is kept of it is given back when nothing is computed."""
        if (stream := self._streams.pop(request, None)) is not None:
            self._ended.append(stream)

    def plan(self) -> HeadDrafts | None:
        """Return what to compute before the next step is planned; None: nothing is worth it."""
        decoding = self._queues.decoding
        for request in decoding:  # its drafts begin behind token 1, wherever that was sampled
            if request.tapped is not None and request.guesses is None:
                self.drafter(request)
        self._learn()
        if self._queues.waiting or len(decoding) < len(self._queues.running):
            return None
        wanted = [
            (stream, request.sampling.max_tokens - len(request.output_token_ids) - 1)
            for request in decoding
            if (stream := self._streams.get(request)) is not None
            and stream.num_waiting
            and request.leg_token_limit is None
        ]
        least = self._head.num_layers  # all of them, so that none lags behind the stream
        wanted = [(stream, most) for stream, most in wanted if most >= least]
        if not wanted:
            return None
        streams = [stream for stream, _ in wanted]
        depth = self._best_depth(decoding, streams)
        if not depth:
            self._refused(streams)
            return None
        drafts = [(stream, min(max(depth, least), most)) for stream, most in wanted]
        drafts = [(s, most) for s, most in drafts if s.kv.has_room(s.num_waiting + most)]
        if not drafts:
            return None
        self._last = HeadDrafts(self._head, drafts, self._now)
        return self._last

    def awaits(self, rows: Sequence[Scheduled], gap_s: float) -> bool:
        """As core.Awaits: whether to go on from what the step that runs will have copied out."""
        decoding = self._queues.decoding
        if self._queues.waiting or len(decoding) < len(self._queues.running):
            return False
        known = [self._streams.get(request) for request, _ in rows]
        streams = [s for s in known if s is not None and s.request.leg_token_limit is None]
        if not streams:
            return False
        is_worth_it = self._best_depth(decoding, streams, gap_s) > 0
        if not is_worth_it:
            self._refused(streams)
        return is_worth_it

    def _best_depth(
        self, decoding: Sequence[Request], streams: Sequence[HeadStream], gap_s: float = 0.0
    ) -> int:
        shape = StepShape(
            num_tokens=len(decoding),
            num_sampled=len(decoding),
            decode_context=sum(request.num_computed_tokens + 1 for request in decoding),
        )
        limit_s = min(request.targets.tpot_s for request in decoding)
        likely = [stream.likely for stream in streams]
        draft_s = partial(self._draft_s, len(streams), gap_s)
        return best_depth(shape, likely, self._step_s, draft_s, limit_s).num_drafts

    def _draft_s(self, num_streams: int, gap_s: float, num_drafts: int) -> float:
        return self._token_s * num_streams * max(num_drafts, self._head.num_layers) + gap_s

    def _learn(self) -> None:
        """Take in what the last drafts took, and the rows of the last step."""
        for request, stream in [*self._streams.items()]:
            tapped, request.tapped = request.tapped, None
            if request.is_done:
                self.ended(request)
            elif tapped is not None and self._is_ours(tapped):
                stream.take(tapped)
            elif tapped is not None:
                stream.forget()
        if (last := self._last) is not None:
            self._last = None
            self.work.seconds += last.seconds
            self.work.tokens += last.num_tokens
            token_s = last.seconds / sum(number for _, number in last.wanted)
            weight = _NEWEST if self._token_s else 1.0
            self._token_s += weight * (token_s - self._token_s)
            if last.has_failed:
                self._ended += self._streams.values()
                self._streams.clear()
                self._has_failed = True
                self._runner.taps = None
        for stream in self._ended:
            stream.forget()
        self._ended = []

    def _is_ours(self, tapped: Tapped) -> bool:
        """Whether the rows are for this head: another node may have sent them for another one."""
        return (tapped.head, tapped.rows.shape[1]) == (self._head.name, self._head.width)

    def _refused(self, streams: Sequence[HeadStream]) -> None:
        for stream in streams:
            stream.untried()
        self._num_refused += 1
        if self._num_refused % _REFUSED_OFTEN == 0:
            self._shares.forget(0)
