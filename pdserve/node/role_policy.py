"""The policy of a node whose role is prefill: the prefill policy, or the decode policy.

In adaptive mode a coordinator may give whole requests to any node, so a prefill node may also
decode. Its streams have TPOT promises like any others. So while there are streams, or some wait to
join, the decode policy plans the steps: decodes first, and beside them prompt chunks (also of
prefill legs) as large as the streams' TPOT allows. A stream that another node takes over counts to
its last token here. Without streams, the prefill policy plans the steps; so it does beside streams
that flow (`DecodeLeg.flows`), which need not be spared.
"""

from __future__ import annotations

from collections.abc import Callable

from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Policy, Queues


class PrefillRolePolicy:
    """Delegates each step to one of two policies (`pdserve.engine.scheduler.Policy`).

    The prefill policy starts no prompt while KV that has not been pulled takes more than its share
    of the pool. The decode policy does not know about such KV, so the rule is applied here: prefill
    legs that would add to it are hidden from the decode policy. Otherwise two nodes whose pools are
    full of KV for each other could wait forever. Other requests are not hidden: those that pin no
    KV free their blocks by themselves, and so do the streams of the nodes that are to pull. So some
    KV is pulled eventually, the share falls, and the legs are visible again. Prefill legs that have
    started continue meanwhile.
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
            prefill: plans while there are no streams, or only such that flow.
            decode: plans while there are others.
            num_pinned: returns the number of blocks that other nodes are to pull.
            most_pinned: limit on these blocks and those of running prefill legs, from which on no
                prefill leg is started, unless there are none. One step may exceed it by the prompts
                that it starts.
        """
        self._prefill = prefill
        self._decode = decode
        self._num_pinned = num_pinned
        self._most_pinned = max(1, most_pinned)  # may be less than a block

    def plan(self, queues: Queues) -> list[Scheduled]:
        """As Policy.plan."""
        # The decode policy also handles a claim for which all streams have been preempted.
        streams = queues.streams + queues.decoding  # the latter also if they end here now
        if not queues.claims and all(stream.flows for stream in streams):
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
        """Remove the prefill legs that must not start now from the queue, and return them."""
        legs = [request for request in queues.waiting if request.is_prefill_leg]
        if not legs:
            return []
        begun = (r for r in queues.running if r.is_prefill_leg)
        num_held = self._num_pinned() + sum(len(r.block_table) for r in begun)
        if num_held < self._most_pinned:
            return []
        for request in legs:
            queues.waiting.remove(request)
        return legs
