"""The layout of a paged KV pool, and the arithmetic that follows from it.

    kv_pool[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]

One KV block is one contiguous region across all layers: K then V, head-major. So a block moves as
one span, a layer range of a block as one span, and a head range as one span per layer and K/V.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum

import msgspec

from pdserve.errors import KvBudgetTooSmall

LAYOUT_VERSION = 1


class KvDtype(StrEnum):
    """Element type of the KV cache (and of the model's activations)."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self is KvDtype.FLOAT32 else 2


class KvLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape of one node's KV blocks. All sizes are per node (per tensor-parallel rank)."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    dtype: KvDtype

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token: 2 · layers · kv_heads · head_dim · itemsize."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, across all layers."""
        return self.token_bytes * self.block_size

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's K (or V) of one layer in one block: the smallest contiguous run."""
        return self.block_size * self.head_dim * self.dtype.itemsize

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer (K and V) of one block."""
        return 2 * self.num_kv_heads * self.head_bytes

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """[num_layers, 2, num_kv_heads, block_size, head_dim]."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy, the last one perhaps partly."""
        return -(-num_tokens // self.block_size)

    def blocks_in_budget(self, budget_bytes: int, max_model_len: int) -> int:
        """How many blocks a memory budget holds.

        Raises:
            KvBudgetTooSmall: one request of `max_model_len` tokens would not fit; with the numbers.
        """
        num_blocks = budget_bytes // self.block_bytes
        needed = self.blocks_for(max_model_len)
        if num_blocks < needed:
            raise KvBudgetTooSmall(
                f"a KV budget of {budget_bytes} bytes holds {num_blocks} blocks of "
                f"{self.block_bytes} bytes ({self.describe()}), but one request of "
                f"max_model_len {max_model_len} needs {needed} blocks = "
                f"{needed * self.block_bytes} bytes: raise the budget or lower max_model_len"
            )
        return num_blocks

    def describe(self) -> str:
        """One line for logs and errors: the KV arithmetic in full."""
        return (
            f"2 x {self.num_layers} layers x {self.num_kv_heads} KV heads x {self.head_dim} "
            f"head_dim x {self.dtype.itemsize} bytes ({self.dtype}) = {self.token_bytes} bytes "
            f"a token, {self.block_size} tokens a block"
        )

    def fingerprint(self, model_id: str, revision: str) -> str:
        """Hash that two nodes compare when they first meet: same model, same layout."""
        content = msgspec.json.encode((LAYOUT_VERSION, model_id, revision, self))
        return hashlib.blake2b(content, digest_size=16).hexdigest()
