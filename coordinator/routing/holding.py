"""When token 1 is held back: while its decode node has no place for it, and its class allows it.

The wait of a handover for a place in the batch falls between tokens 1 and 2, so it breaks the TPOT
of a request whose TTFT may have seconds to spare; and prefill nodes send short prompts that have
queued behind a long one in a burst. The client gains nothing by a token that no other follows. So
where a decode node is full, token 1 is shown when the stream goes on, as where decode nodes send
all tokens themselves, but no later than the class says, which its TTFT bounds.

A decode node is full if it lets others wait, or if its batch of now would be too slow with one more
in it. The second alone would trust a prediction; the first alone sees a queue only when the first
one in it has lost its TPOT.
"""

from __future__ import annotations

from typing import Final

from coordinator.routing.sides import SAFETY
from pdserve.protocol import Slo

_PATIENCE: Final = 4.0  # promised gaps: what takes longer to go on waits for a place


def is_full(slo: Slo, longest_wait_s: float, step_s: float) -> bool:
    """Whether such a request would have to wait for a place at a decode node.

    Args:
        slo: what it was promised.
        longest_wait_s: of those that have token 1 and not yet token 2.
        step_s: predicted, of the batch of now with this one in it; 0 if it would be alone.
    """
    if slo.tpot_s <= 0:
        return False
    return longest_wait_s > _PATIENCE * slo.tpot_s or step_s > SAFETY * slo.tpot_s
