"""`slack-batch`: requests with time in hand skip steps, so that tight ones get short steps."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf

from decode_node.policies.decodes_first import DecodesFirst
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Queues


class SlackBatch(DecodesFirst):
    """Batches by slack (after Kairos): for TPOT classes that differ much.

    A request's slack is the time until its next token is due, n promised gaps behind token 1.
    Every step runs those that could not wait for the next one, and is filled with the others,
    least slack first, as long as the predicted time of the step keeps the tightest slack. A
    request that was promised 0.5 s beside one that was promised 0.05 s thus runs in one of ten
    steps, and ten of its kind take the place of one. With one promise for all it is `tpot-cap`.
    """

    def has_place(self, members: Sequence[Request], newcomer: Request) -> bool:
        """While the share of steps that each needs adds up to a batch that is fast enough."""
        if not members:
            return True
        batch = [*members, newcomer]
        tightest_s = self.pace.tightest_s(batch)
        num_rows = num_context_tokens = 0.0
        for request in batch:
            cap_s = self.pace.cap_s(request)
            share = tightest_s / cap_s if cap_s < inf else 1.0
            num_rows += share
            num_context_tokens += share * request.num_tokens
        # A hair less than it adds up to: shares of 1 are to add up to whole numbers.
        predicted_s = self.pace.perf.decode_s(ceil(num_rows - 1e-9), ceil(num_context_tokens))
        return num_rows <= self.max_batch_size and predicted_s <= tightest_s

    def pick(self, decoding: list[Request], most: int) -> list[Request]:
        """Those with the least slack, for as long as the tightest of all allows."""
        if not decoding:
            return []
        slack_s = {request: self.pace.in_hand_s(request) for request in decoding}
        # Who is late cannot be helped by a step that is shorter than its share.
        limit_s = min(max(slack_s[r], self.pace.cap_s(r)) for r in decoding)
        if len(decoding) <= most and self.pace.decode_s(decoding) <= limit_s:
            return decoding

        def urgency(request: Request) -> tuple[bool, int, float]:
            can_wait = slack_s[request] >= 2 * limit_s  # for this step, and then for its own
            return can_wait, 0 if can_wait else -request.targets.priority, slack_s[request]

        return self._fill(sorted(decoding, key=urgency)[:most], limit_s)

    def limit_s(self, decoding: Sequence[Request], queues: Queues) -> float:
        """The tightest promise, of those who are on their way as well."""
        return self.pace.step_limit_s(decoding, queues)

    def _fill(self, candidates: Sequence[Request], limit_s: float) -> list[Request]:
        """The first of them, and those after it that fit."""
        num_context_tokens = 0
        for count, request in enumerate(candidates):
            num_context_tokens += request.num_tokens
            if count and self.pace.perf.decode_s(count + 1, num_context_tokens) > limit_s:
                return list(candidates[:count])
        return list(candidates)
