"""How many ranks a node has, and what memory they share. No torch here: a rank maps it first."""

from __future__ import annotations

import msgspec

from pdserve import _native

STEP_BYTES = 64 << 20  # tokens and block tables of a step
RESULT_BYTES = 1 << 30  # logits and final states of a step


class Parallelism(msgspec.Struct, frozen=True):
    """How the model of a node is divided: by layers into stages, and each by heads into ranks."""

    tensor: int = 1  # ranks of a stage
    pipeline: int = 1  # stages

    @property
    def num_ranks(self) -> int:
        """All of them."""
        return self.tensor * self.pipeline


ONE_RANK = Parallelism()


def memory_bytes(stages: tuple[int, ...]) -> int:
    """All memory that the ranks of a host share but for KV; what is never written takes none."""
    return _native.RankGroup.memory_bytes(stages) + STEP_BYTES + RESULT_BYTES
