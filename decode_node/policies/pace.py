"""How fast a batch goes, and how fast it has to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Final

from pdserve.clock import Clock
from pdserve.engine.pace import SAFETY, next_due_s, shown_s, tpot_s
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Queues
from pdserve.perf_model import PerfModel

MADE_UP_WITHIN: Final = 0.1  # of its tokens to come: what a stream was stalled for somebody else


class Pace:
    """Predicted times of batches beside what their requests were promised."""

    def __init__(self, perf: PerfModel, clock: Clock, default_tpot_s: float) -> None:
        """
        Args:
            perf: the node's; its ratios correct the predictions by what was measured.
            clock: the node's.
            default_tpot_s: aimed at for requests that were promised none.
        """
        self.perf = perf
        self._clock = clock
        self._default_tpot_s = default_tpot_s

    def cap_s(self, request: Request) -> float:
        """The longest that its steps should take, on average.

        Infinity where the node could never keep the promise, not even in a step of its own: others
        then gain nothing by staying out. Where it only cannot at the moment, because something else
        slows the node down, batches stay as they would be without that: a slowdown may pass, but
        whole chunks of prompts beside the streams would not be made up for.
        """
        promised_s = tpot_s(request, self._default_tpot_s)
        alone_s = self.perf.decode_s(1, request.num_tokens)
        if alone_s <= promised_s:
            return SAFETY * promised_s
        slowdown = max(self.perf.decode_ratio, 1.0)
        return SAFETY * promised_s * slowdown if alone_s <= promised_s * slowdown else inf

    def tightest_s(self, requests: Iterable[Request]) -> float:
        """The longest that a step of all of these should take; infinity for none."""
        return min(map(self.cap_s, requests), default=inf)

    def step_limit_s(self, decoding: Sequence[Request], queues: Queues) -> float:
        """How long a step of these and of prompts should take.

        Who is on the way here may have to wait for the whole of it.
        """
        remaining = queues.headroom.estimate.remaining
        stalls_s = [self._bears_s(request, remaining(request)) for request in queues.arriving]
        return min([self.tightest_s(decoding), *stalls_s])

    def _bears_s(self, request: Request, num_tokens: float) -> float:
        """The longest stall behind token 1 that it could make up for with all its tokens.

        Infinity where nothing is left to be lost.
        """
        promised_s = tpot_s(request, self._default_tpot_s)
        won_back_s = self._won_back_s(request, num_tokens - 2)  # in the gaps behind the stalled one
        if won_back_s < 0 or self.is_past_saving(request, num_tokens):
            return inf
        return SAFETY * (promised_s + won_back_s)

    def longest_stall_s(self, streams: Sequence[Request], queues: Queues) -> float:
        """The longest step that all of these could soon make up for, by steps without prompts.

        Infinity for none. Nobody knows when an answer ends, so only the nearest of the tokens that
        are to come count. Who is late for good has nothing to lose.
        """
        remaining, step_s = queues.headroom.estimate.remaining, self.decode_s(streams)
        longest_s = inf
        for request in streams:
            num_left = remaining(request)
            if self.catches_up(request, num_left):
                gained_s = max(tpot_s(request, self._default_tpot_s) - step_s, 0.0)  # by each token
                spare_s = self.in_hand_s(request) + MADE_UP_WITHIN * num_left * gained_s
                longest_s = min(longest_s, SAFETY * spare_s)
        return longest_s

    def catches_up(self, request: Request, num_tokens_left: float) -> bool:
        """Whether a stream keeps its promise if it decodes alone from now on."""
        return self.in_hand_s(request) >= -self._won_back_s(request, num_tokens_left)

    def _won_back_s(self, request: Request, num_tokens: float) -> float:
        """What it gains on its schedule with so many tokens in a batch of its own."""
        gained_s = tpot_s(request, self._default_tpot_s) - self.perf.decode_s(1, request.num_tokens)
        if gained_s < 0:
            return -inf
        return num_tokens * gained_s if num_tokens > 0 else 0.0  # 0 times infinity is no number

    def in_hand_s(self, request: Request) -> float:
        """Until its next token is due; negative: it is late."""
        return next_due_s(request, self._default_tpot_s) - self._clock.now()

    def least_in_hand_s(self, requests: Iterable[Request]) -> float:
        """As `in_hand_s`, of the one that has the least; infinity for none."""
        return min(map(self.in_hand_s, requests), default=inf)

    def decode_s(self, requests: Sequence[Request]) -> float:
        """Predicted seconds of a step that decodes these together."""
        num_prompt = sum([len(request.prompt_token_ids) for request in requests])
        num_output = sum([len(request.output_token_ids) for request in requests])
        return self.perf.decode_s(len(requests), num_prompt + num_output)

    def is_past_saving(self, request: Request, num_tokens_left: float) -> bool:
        """Whether a request to be handed over has waited too long to keep its TPOT.

        Steps are aimed at 0.9 of the promise, so each token wins a tenth of it back.
        """
        now_s = self._clock.now()
        began_s = shown_s(request, now_s)
        if began_s is None or request.num_preemptions:
            return False  # nothing has been promised yet, or it was this node's doing
        waited_s = now_s - began_s
        return waited_s > (1 - SAFETY) * request.targets.tpot_s * num_tokens_left

    def until_first_token_s(self, request: Request) -> float:
        """Until its token 1 is due; infinity if nothing was promised."""
        return request.targets.first_token_s - self._clock.now()
