"""When token 1 is held back: while the decode node is full, and if the request's class allows it.

A handed-off request waits for a place in the batch between tokens 1 and 2. This wait breaks its
TPOT, although its TTFT may have seconds to spare; and prefill nodes send short prompts that have
queued behind a long one in a burst. A client gains nothing from a token that no other follows. So
where a decode node is full, token 1 is shown when the stream continues, as in systems where decode
nodes send all tokens, but no later than the class allows, which is bounded by its TTFT.

A decode node is full if it makes others wait (`makes_wait`), or if its current batch has no place
for the request by the batch rule (`pdserve/rules/batch.py`). These predictions alone may be wrong;
the wait of others alone detects a queue only after the first request in it has missed its TPOT.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

PATIENCE: Final = 4.0  # in promised TPOTs: after a longer gap, a request waits for a place


class PendingHandoffs:
    """Requests with token 1 but not token 2, by the decode node's slot."""

    def __init__(self) -> None:
        self._begun_s: defaultdict[int, dict[str, float]] = defaultdict(dict)  # oldest first

    def begin(self, slot: int, request_id: str, now_s: float) -> None:
        """Record that token 1 has arrived."""
        self._begun_s[slot][request_id] = now_s

    def end(self, slot: int, request_id: str) -> None:
        """Record that token 2 has arrived or the request has ended. Idempotent."""
        self._begun_s[slot].pop(request_id, None)

    def longest_s(self, slot: int, now_s: float) -> float:
        """Return how long the oldest handoff has waited; 0 if there is none."""
        return now_s - next(iter(self._begun_s[slot].values()), now_s)

    def makes_wait(self, slot: int, tpot_s: float, now_s: float) -> bool:
        """Return whether a node makes handed-off requests wait, by what this TPOT calls long."""
        return 0 < PATIENCE * tpot_s < self.longest_s(slot, now_s)

    def clear(self, slot: int) -> None:
        """Forget the handoffs of a lost node."""
        self._begun_s[slot].clear()
