"""How many programs share the keys of a decode step (`triton_attention.py`). No Triton here."""

from __future__ import annotations

from typing import Final

MIN_SPLIT_KEYS: Final = 256  # below this a program costs more than it saves
_FEWEST: Final = 16
_MOST: Final = 64  # what is merged at a time has to fit into registers
_PROGRAMS: Final = 128  # for one row: they fill an H100


def num_splits(num_kv_heads: int) -> int:
    """Return how many programs share a row's keys of one KV head, at most: a power of two.

    With the fewer KV heads of one rank among several, more programs for each fill its GPU.
    """
    wanted = -(-_PROGRAMS // num_kv_heads)
    return min(_MOST, max(_FEWEST, 1 << (wanted - 1).bit_length()))


def partial_bytes(num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Return the size of what the programs make of their shares: float32, before it is merged."""
    return num_rows * num_heads * num_splits(num_kv_heads) * (head_dim + 2) * 4
