"""When token 1 is held back: while the decode node is full, and if the request's class allows it.

A handed-off request waits for a place in the batch between tokens 1 and 2. This wait breaks its
TPOT, although its TTFT may have seconds to spare; and prefill nodes send short prompts that have
queued behind a long one in a burst. A client gains nothing from a token that no other follows. So
where a decode node is full, token 1 is shown when the stream continues, as in systems where decode
nodes send all tokens, but no later than the class allows, which is bounded by its TTFT.

A decode node is full if it makes others wait, or if its current batch would be too slow with one
more request, or have no row or no KV left for it. These predictions alone may be wrong; the wait of
others alone detects a queue only after the first request in it has missed its TPOT.
"""

from __future__ import annotations

from typing import Final

from coordinator.routing.sides import SAFETY
from pdserve.protocol import Slo

_PATIENCE: Final = 4.0  # in promised TPOTs: after a longer gap, a request waits for a place


def makes_wait(slo: Slo, longest_wait_s: float) -> bool:
    """Return whether a decode node makes handed-off requests wait, by what this promise calls long.

    `longest_wait_s`: the longest wait there among requests with token 1 but not token 2.
    """
    return 0 < slo.tpot_s * _PATIENCE < longest_wait_s


def has_place(slo: Slo, step_s: float, *, has_room: bool) -> bool:
    """Return whether a request has a place in a decode node's batch.

    Args:
        slo: the promise of the request.
        step_s: predicted step of the current batch with this request in it.
        has_room: whether that batch has a row and KV for it.
    """
    return has_room and step_s <= SAFETY * slo.tpot_s
