"""When token 1 is held back: while its decode node lets others wait, and its class allows it.

The wait of a handover for a place in the batch falls between tokens 1 and 2, so it breaks the TPOT
of a request whose TTFT may have seconds to spare; and prefill nodes send short prompts that have
queued behind a long one in a burst. The client gains nothing by a token that no other follows. So
where a decode node is seen to be full, token 1 is shown when the stream goes on, as where decode
nodes send all tokens themselves, but no later than the class says, which its TTFT bounds.
"""

from __future__ import annotations

from typing import Final

from pdserve.protocol import Slo

_PATIENCE: Final = 4.0  # promised gaps: what takes longer to go on waits for a place


def is_full(slo: Slo, longest_wait_s: float) -> bool:
    """Whether a decode node, to such a request, is one where it would have to wait for a place.

    `longest_wait_s`: of those that have token 1 and not yet token 2.
    """
    return slo.tpot_s > 0 and longest_wait_s > _PATIENCE * slo.tpot_s
