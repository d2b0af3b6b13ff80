"""When token 1 is held back: while the decode node is full, and if the request's class allows it.

A handed-off request waits for a place in the batch between tokens 1 and 2. This wait breaks its
TPOT, although its TTFT may have seconds to spare; and prefill nodes send short prompts that have
queued behind a long one in a burst. A client gains nothing from a token that no other follows. So
where a decode node is full, token 1 is shown when the stream continues, as in systems where decode
nodes send all tokens, but no later than the class allows, which is bounded by its TTFT.

A decode node is full if it makes others wait, or if its current batch would be too slow with one
more request. The second test alone would trust a prediction; the first alone detects a queue only
after the first request in it has missed its TPOT.
"""

from __future__ import annotations

from typing import Final

from coordinator.routing.sides import SAFETY
from pdserve.protocol import Slo

_PATIENCE: Final = 4.0  # in promised TPOTs: after a longer gap, a request waits for a place


def is_full(slo: Slo, longest_wait_s: float, step_s: float) -> bool:
    """Return whether a request would have to wait for a place at a decode node.

    Args:
        slo: the promise of the request.
        longest_wait_s: the longest wait among requests with token 1 but not token 2.
        step_s: predicted step of the current batch with this request; 0 if it would be alone.
    """
    if slo.tpot_s <= 0:
        return False
    return longest_wait_s > _PATIENCE * slo.tpot_s or step_s > SAFETY * slo.tpot_s
