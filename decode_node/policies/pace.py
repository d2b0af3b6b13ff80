"""Predicted step times of batches, and the step times that their TPOT targets require."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Final

from pdserve.engine.request import Request, next_due_s, shown_s, tpot_s
from pdserve.engine.scheduler import Queues
from pdserve.measured.perf_model import PerfModel
from pdserve.rules.batch import SAFETY
from pdserve.shared.clock import Clock

UNPROMISED: Final = 2.0  # times its step alone that a request without a promise bears in a batch
MADE_UP_WITHIN: Final = 0.25  # of a stream's remaining tokens: they make up for a stall


class Pace:
    """Compares predicted step times with the latencies promised to the requests."""

    def __init__(self, perf: PerfModel, clock: Clock, default_tpot_s: float) -> None:
        """
        Args:
            perf: the node's performance model; its ratios correct predictions by measurements.
            clock: the node's clock.
            default_tpot_s: the TPOT aimed at for requests without a TPOT target.
        """
        self.perf = perf
        self._clock = clock
        self._default_tpot_s = default_tpot_s

    def cap_s(self, request: Request) -> float:
        """Return the longest time that the request's steps should take, on average.

        Infinity if the node could never keep the promised TPOT, not even with this request alone:
        keeping others out would then gain nothing. If it only cannot do so at the moment, because
        something else slows the node down, the cap grows with the slowdown, so that batches stay as
        they would be without it: the slowdown may pass, but the stream could not make up for whole
        prompt chunks in its steps.

        Without a promise it is never less than `UNPROMISED`: where a step alone takes nearly the
        default, all would wait for each other, one by one, to be hardly faster.
        """
        promised_s = tpot_s(request, self._default_tpot_s)
        alone_s = self.perf.decode_s(1, request.num_tokens)
        least_s = UNPROMISED * alone_s if request.targets.tpot_s == inf else 0.0
        if alone_s <= promised_s:
            return max(SAFETY * promised_s, least_s)
        slowdown = max(self.perf.decode_ratio, 1.0)
        if alone_s <= promised_s * slowdown:
            return max(SAFETY * promised_s * slowdown, least_s)
        return inf

    def tightest_s(self, requests: Iterable[Request]) -> float:
        """Return the longest that a step of all these requests should take; infinity for none."""
        return min(map(self.cap_s, requests), default=inf)

    def step_limit_s(self, decoding: Sequence[Request], queues: Queues) -> float:
        """Return how long a step of these decodes and of prompt chunks should take.

        Requests whose KV is arriving count as well, since they may have to wait for the whole step.
        """
        remaining = queues.headroom.remaining
        stalls_s = [self._bears_s(request, remaining(request)) for request in queues.arriving]
        return min([self.tightest_s(decoding), *stalls_s])

    def _bears_s(self, request: Request, num_tokens: float) -> float:
        """Return the longest stall after token 1 that the request could soon make up for.

        Infinity if its TPOT is lost anyway.
        """
        promised_s = tpot_s(request, self._default_tpot_s)
        num_gaps = num_tokens - 2  # after the stalled one
        won_back_s = self._won_back_s(request, MADE_UP_WITHIN * num_gaps)
        if won_back_s < 0 or self.has_lost_tpot(request, num_tokens):
            return inf
        return SAFETY * (promised_s + won_back_s)

    def longest_stall_s(self, streams: Sequence[Request], queues: Queues) -> float:
        """Return the longest step that these streams could soon make up for without prompts.

        Infinity if there are no streams. The length of an answer is unknown, so only a share of the
        expected remaining tokens counts (`MADE_UP_WITHIN`). Streams that cannot catch up any more
        are ignored.
        """
        remaining, step_s = queues.headroom.remaining, self.decode_s(streams)
        longest_s = inf
        for request in streams:
            num_left = remaining(request)
            if self.catches_up(request, num_left):
                gained_s = max(tpot_s(request, self._default_tpot_s) - step_s, 0.0)  # per token
                spare_s = self.in_hand_s(request) + MADE_UP_WITHIN * num_left * gained_s
                longest_s = min(longest_s, SAFETY * spare_s)
        return longest_s

    def catches_up(self, request: Request, num_tokens_left: float) -> bool:
        """Whether the stream would still keep its TPOT if it decoded alone from now on."""
        return self.in_hand_s(request) >= -self._won_back_s(request, num_tokens_left)

    def _won_back_s(self, request: Request, num_tokens: float) -> float:
        """Return how much time `num_tokens` tokens in a batch of its own regain for the request."""
        gained_s = tpot_s(request, self._default_tpot_s) - self.perf.decode_s(1, request.num_tokens)
        if gained_s < 0:
            return -inf
        return num_tokens * gained_s if num_tokens > 0 else 0.0  # 0 times infinity is not a number

    def in_hand_s(self, request: Request) -> float:
        """Return the seconds until the request's next token is due; negative if it is late."""
        return next_due_s(request, self._default_tpot_s) - self._clock.now()

    def least_in_hand_s(self, requests: Iterable[Request]) -> float:
        """Return the least `in_hand_s` of these requests; infinity for none."""
        return min(map(self.in_hand_s, requests), default=inf)

    def decode_s(self, requests: Sequence[Request]) -> float:
        """Return the predicted seconds of a step that decodes these requests together."""
        num_prompt = sum([len(request.prompt_token_ids) for request in requests])
        num_output = sum([len(request.output_token_ids) for request in requests])
        return self.perf.decode_s(len(requests), num_prompt + num_output)

    def has_lost_tpot(self, request: Request, num_tokens_left: float) -> bool:
        """Whether a request to be handed off has waited too long to keep its TPOT.

        Steps are aimed at 0.9 of the promised TPOT, so each token regains a tenth of it.
        """
        now_s = self._clock.now()
        began_s = shown_s(request, now_s)
        if began_s is None or request.num_preemptions:
            return False  # TPOT does not count yet, or this node caused the wait
        waited_s = now_s - began_s
        return waited_s > (1 - SAFETY) * request.targets.tpot_s * num_tokens_left

    def until_first_token_s(self, request: Request) -> float:
        """Return the seconds until token 1 is due; infinity without a TTFT target."""
        return request.targets.first_token_s - self._clock.now()
