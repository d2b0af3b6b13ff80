"""`static`: a batch runs to its end before the next one is admitted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from decode_node.policies.decodes_first import DecodesFirst
from decode_node.policies.line import fits
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Queues


class Static(DecodesFirst):
    """Request-level batching, as it was before Orca; for comparison.

    A batch is open until its first decode step, which comes when no more prompts can be computed.
    From then on, short answers leave empty rows behind until the longest answer has ended. Streams
    that another node takes over are no members any more: their last step waits for no batch.
    """

    def compose(self, queues: Queues) -> tuple[list[Scheduled], list[Scheduled]]:
        """Return prompt chunks while the batch is open, then decodes until it is empty."""
        if not _has_begun(queues.streams):
            leaving = queues.decode(_leaving(queues))
            chunks = self.prompts.plan(queues, leaving, inf, self)
            if chunks:
                return leaving, chunks
        return super().compose(queues)

    def plan_decodes(self, queues: Queues) -> list[Scheduled]:
        """As SideBySide.plan_decodes: only of streams that leave while the batch is open."""
        if not self._is_open(queues):
            return super().plan_decodes(queues)
        leaving = queues.decode(_leaving(queues))
        if leaving:
            self._charge(queues, leaving, [])
        return leaving

    def has_place(self, members: Sequence[Request], newcomer: Request) -> bool:
        """Whether the batch is still open; a preempted member may always come back."""
        if newcomer.num_preemptions:
            return True
        return not _has_begun(members) and len(members) < self.max_batch_size

    def pick(self, decoding: list[Request], most: int) -> list[Request]:
        """Return the whole batch."""
        return decoding[:most]

    def limit_s(self, decoding: Sequence[Request], queues: Queues) -> float:
        """Return infinity: nothing bounds a step's time."""
        return inf

    def _is_open(self, queues: Queues) -> bool:
        """Whether a prompt of the next batch is being computed beside, or can be now."""
        if _has_begun(queues.streams):
            return False
        if queues.elsewhere or any(not request.is_decoding for request in queues.running):
            return True
        first = self.first(queues)
        if first is None or first in queues.claims or queues.is_closed_to(first):
            return False
        return fits(queues, self, first)


def _leaving(queues: Queues) -> list[Request]:
    """Return the streams that end here with their next token, and go on elsewhere."""
    return [request for request in queues.decoding if request.is_prefill_leg]


def _has_begun(members: Iterable[Request]) -> bool:
    """Whether a decode step was made; token 1 comes from the prefill."""
    return any(len(request.output_token_ids) > 1 for request in members)
