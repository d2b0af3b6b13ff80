"""`tpot-cap`: limits the batch to what the tightest TPOT in it allows."""

from __future__ import annotations

from collections.abc import Sequence

from decode_node.policies.decodes_first import DecodesFirst
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Queues
from pdserve.rules.batch import has_place


class TpotCap(DecodesFirst):
    """Admits a request only while the predicted step time stays within every TPOT.

    The limit is 0.9 of the tightest TPOT, the newcomer's included. The predicted step time is
    corrected by measurements (DistServe's aim; Mooncake and Arrow bound decode load likewise).
    """

    def has_place(self, members: Sequence[Request], newcomer: Request) -> bool:
        """Whether all members and the newcomer keep their TPOT in one batch."""
        batch = [*members, newcomer]
        step_s, limit_s = self.pace.decode_s(batch), self.pace.tightest_s(batch)
        return has_place(len(batch), self.max_batch_size, step_s, limit_s)

    def pick(self, decoding: list[Request], most: int) -> list[Request]:
        """Return all requests, as a rule: each admitted request has a place in every step."""
        return decoding[:most]

    def limit_s(self, decoding: Sequence[Request], queues: Queues) -> float:
        """Return the tightest limit, including that of requests whose KV is arriving."""
        return self.pace.step_limit_s(decoding, queues)
