"""What the engine of a node follows whose role is to prefill, while it also has streams.

A coordinator in adaptive mode gives requests as a whole to any node that has time for them, so a
prefill node may decode as well. Its streams were promised a TPOT as all others were. So while there
are any, or some wait to join, the decode policy plans: decodes first, and beside them chunks of
prompts, those of prefill legs among them, as large as the streams allow. Without streams, the
prefill policy plans.
"""

from __future__ import annotations

from collections.abc import Callable

from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Policy, Queues


class PrefillRolePolicy:
    """Either of two policies (`pdserve.engine.scheduler.Policy`), anew at every step.

    The prefill policy begins no prompt while KV that nobody has pulled takes more than its share of
    the pool; the decode policy knows nothing of such KV. So that rule is applied here for it: legs
    that would add to that KV are kept out of its sight. Two nodes whose pools were full of KV for
    each other would wait for ever. Nobody else is kept out: what pins no KV frees its blocks by
    itself, and so do the streams of those who are to pull. So somebody pulls at last, the share
    falls, and the legs come back into sight; each of those that are under way goes on meanwhile.
    """

    def __init__(
        self,
        prefill: Policy,
        decode: Policy,
        num_pinned: Callable[[], int],
        most_pinned: int,
    ) -> None:
        """
        Args:
            prefill: plans while there are no streams.
            decode: plans while there are.
            num_pinned: blocks that others are to pull.
            most_pinned: so many of them, and of legs that will add to them, keep others out. Passed
                by the prompts that one step begins, at most.
        """
        self._prefill = prefill
        self._decode = decode
        self._num_pinned = num_pinned
        self._most_pinned = most_pinned

    def plan(self, queues: Queues) -> list[Scheduled]:
        """As Policy.plan."""
        # Of a claim that all streams have made way for, the decode policy has to think too.
        if not queues.streams and not queues.claims:
            return self._prefill.plan(queues)
        kept_out = self._take_out(queues)
        try:
            return self._decode.plan(queues)
        finally:
            if kept_out:
                queues.waiting.extend(kept_out)
                queues.kept_out = queues.kept_out or kept_out[0]
                queues.held_back.start()

    def _take_out(self, queues: Queues) -> list[Request]:
        """Prefill legs that may not be begun now; taken out of the line."""
        legs = [request for request in queues.waiting if request.leg_token_limit is not None]
        if not legs:
            return []
        begun = (r for r in queues.running if r.leg_token_limit is not None)
        if self._num_pinned() + sum(len(r.block_table) for r in begun) < self._most_pinned:
            return []
        for request in legs:
            queues.waiting.remove(request)
        return legs
