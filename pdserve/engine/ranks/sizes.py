"""How much memory ranks share. No torch here: a rank maps it before it imports that."""

from __future__ import annotations

from pdserve import _native

STEP_BYTES = 64 << 20  # tokens and block tables of a step
LOGITS_BYTES = 1 << 30


def memory_bytes(num_ranks: int) -> int:
    """All of it; what is never written to takes none."""
    return _native.RankGroup.memory_bytes(num_ranks) + STEP_BYTES + LOGITS_BYTES
