"""`tpot-cap`: a batch no larger than the tightest TPOT in it allows."""

from __future__ import annotations

from collections.abc import Sequence

from decode_node.policies.decodes_first import DecodesFirst
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Queues


class TpotCap(DecodesFirst):
    """Lets a request in only while the step that it would make stays within the promises.

    The limit is 0.9 of the tightest TPOT, the newcomer's included, for the predicted step time as
    corrected by measured ones (DistServe's aim; Mooncake and Arrow bound decode load likewise).
    """

    def has_place(self, members: Sequence[Request], newcomer: Request) -> bool:
        """While nobody's promise is broken by it."""
        if not members:
            return True
        batch = [*members, newcomer]
        return len(batch) <= self.max_batch_size and (
            self.pace.decode_s(batch) <= self.pace.tightest_s(batch)
        )

    def pick(self, decoding: list[Request], most: int) -> list[Request]:
        """All, as a rule: who came in has a place in every step."""
        return decoding[:most]

    def limit_s(self, decoding: Sequence[Request], queues: Queues) -> float:
        """The tightest promise, of those who are on their way as well."""
        return self.pace.step_limit_s(decoding, queues)
