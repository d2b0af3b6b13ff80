"""What a draft model, or head, costs a node: time, and memory beside the model's KV."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.engine.kv.block_pool import BlockPool


@dataclass(slots=True)
class DraftWork:
    """Of one that computes its drafts."""

    pool: BlockPool  # of its KV
    block_bytes: int
    seconds: float = 0.0  # that it has computed, between steps
    tokens: int = 0  # that it has computed: of prompts, of answers, and drafts

    @property
    def kv(self) -> tuple[int, int]:
        """Bytes of kv_memory that its KV has, and of these, those that streams have."""
        num_blocks = self.pool.num_blocks
        return num_blocks * self.block_bytes, (num_blocks - self.pool.num_free) * self.block_bytes
