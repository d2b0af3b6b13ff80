"""Latent attention (MLA): of a token only one short row is kept, for all heads. No torch here.

The row is the normed latent vector, and behind it a part that is rotated. A head's keys and values
are linear in the latent vector, so both are computed on the queries' side ("absorbed"):

    score = (key_of_headᵀ · q_nope) · latent + q_rope · k_rope
    value = value_of_head · (sum over the context of weight x latent)

Prompts are computed so as well: then the bits of a row do not depend on how a prompt is divided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdserve.engine.models.json_fields import JsonFields

LATENT_NORMS: Final = ("query_latent_norm", "latent_norm")  # of a layer's plan


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes of latent attention, of each head but for the ranks."""

    rank: int  # of the latent vector
    rope_dim: int  # of queries and keys, that is rotated
    nope_dim: int  # of queries and keys, that is not
    value_dim: int
    query_rank: int | None  # queries are made of a latent vector of theirs; None: they are not
    norm_eps: float = 1e-6  # of latent vectors, whatever config.json says of other norms
    # Keys and values of heads are two tensors, and keys are [rank, nope_dim] as they are used.
    splits_heads: bool = False

    @property
    def query_dim(self) -> int:
        """Size of a query before its key is absorbed."""
        return self.nope_dim + self.rope_dim

    @property
    def row_dim(self) -> int:
        """Size of what is kept of a token, and of a query that is scored with it."""
        return self.rank + self.rope_dim

    def head_order(self, head_dim: int, rope_order: tuple[int, ...]) -> tuple[int, ...]:
        """As `RopeConfig.head_order`, where that is the order of the last dimensions alone."""
        first = head_dim - self.rope_dim
        return (*range(first), *(first + each for each in rope_order)) if rope_order else ()


def no_latent(fields: JsonFields) -> LatentShape | None:
    """Heads have keys and values of their own."""
    return None


def deepseek_latent(fields: JsonFields) -> LatentShape:
    """Raises ModelError: a size is missing, or contradicts another."""
    heads = fields.integer("num_attention_heads")
    if fields.integer("num_key_value_heads", heads) != heads:
        raise fields.error("num_key_value_heads", f"{heads}, the number of heads")
    rope_dim = fields.integer("qk_rope_head_dim")
    if rope_dim % 2:
        raise fields.error("qk_rope_head_dim", "even: the rotary embedding turns pairs")
    return LatentShape(
        fields.integer("kv_lora_rank"),
        rope_dim,
        fields.integer("qk_nope_head_dim"),
        fields.integer("v_head_dim"),
        fields.integer("q_lora_rank") if "q_lora_rank" in fields else None,
        splits_heads=fields.boolean("stored_split_heads", False),
    )
