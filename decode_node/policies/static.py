"""`static`: a batch runs to its end before the next one is admitted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from decode_node.policies.decodes_first import DecodesFirst
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Queues


class Static(DecodesFirst):
    """Request-level batching, as it was before Orca; for comparison.

    A batch is open until its first decode step, which comes when no more prompts can be computed.
    From then on, short answers leave empty rows behind until the longest answer has ended.
    """

    def compose(self, queues: Queues) -> tuple[list[Scheduled], list[Scheduled]]:
        """Return prompt chunks while the batch is open, then decodes until it is empty."""
        if not _has_begun(queues.streams):
            chunks = self.prompts.plan(queues, [], inf, self)
            if chunks:
                return [], chunks
        return super().compose(queues)

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


def _has_begun(members: Iterable[Request]) -> bool:
    """Whether a decode step was made; token 1 comes from the prefill."""
    return any(len(request.output_token_ids) > 1 for request in members)
