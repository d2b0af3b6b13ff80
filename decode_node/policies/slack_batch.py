"""`slack-batch`: requests with slack skip steps, so that tight ones get short steps."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf

from decode_node.policies.decodes_first import DecodesFirst
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Queues
from pdserve.rules.batch import has_place


class SlackBatch(DecodesFirst):
    """Batches by slack (after Kairos): for TPOT classes that differ much.

    A request's slack is the time until its next token is due, n promised gaps after token 1. Every
    step runs the requests that could not wait for the next step. It is then filled with the others,
    least slack first, while the predicted step time stays within the tightest slack. A request with
    a TPOT of 0.5 s beside one with 0.05 s thus runs in one of ten steps, and ten such requests take
    one place. If all requests have the same TPOT, this is `tpot-cap`.
    """

    def has_place(self, members: Sequence[Request], newcomer: Request) -> bool:
        """Whether a batch made of each request's share of the steps would still be fast enough."""
        batch = [*members, newcomer]
        tightest_s = self.pace.tightest_s(batch)
        num_rows = num_context_tokens = 0.0
        for request in batch:
            cap_s = self.pace.cap_s(request)
            share = tightest_s / cap_s if cap_s < inf else 1.0
            num_rows += share
            num_context_tokens += share * request.num_tokens
        # Slightly less than the sum: shares of 1 must add up to whole numbers.
        predicted_s = self.pace.perf.decode_s(ceil(num_rows - 1e-9), ceil(num_context_tokens))
        return has_place(num_rows, self.max_batch_size, predicted_s, tightest_s)

    def pick(self, decoding: list[Request], most: int) -> list[Request]:
        """Return the requests with the least slack, as many as the tightest slack allows."""
        if not decoding:
            return []
        slack_s = {request: self.pace.in_hand_s(request) for request in decoding}
        # A late request gains nothing from a step that is shorter than its share.
        limit_s = min(max(slack_s[r], self.pace.cap_s(r)) for r in decoding)
        if len(decoding) <= most and self.pace.decode_s(decoding) <= limit_s:
            return decoding

        def urgency(request: Request) -> tuple[bool, int, float]:
            can_wait = slack_s[request] >= 2 * limit_s  # for this step, and then for its own
            return can_wait, 0 if can_wait else -request.targets.priority, slack_s[request]

        return self._fill(sorted(decoding, key=urgency)[:most], limit_s)

    def limit_s(self, decoding: Sequence[Request], queues: Queues) -> float:
        """Return the tightest limit, including that of requests whose KV is arriving."""
        return self.pace.step_limit_s(decoding, queues)

    def _fill(self, candidates: Sequence[Request], limit_s: float) -> list[Request]:
        """Return the first candidate, and those after it that fit."""
        num_context_tokens = 0
        for count, request in enumerate(candidates):
            num_context_tokens += request.num_tokens
            if count and self.pace.perf.decode_s(count + 1, num_context_tokens) > limit_s:
                return list(candidates[:count])
        return list(candidates)
