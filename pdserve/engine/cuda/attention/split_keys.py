"""How many programs share the keys of a decode step (`triton_attention.py`). No Triton here."""

from __future__ import annotations

from typing import Final

NUM_SPLITS: Final = 16  # programs that share a row's keys: 8 KV heads then fill an H100
MIN_SPLIT_KEYS: Final = 256  # below this a program costs more than it saves


def partial_bytes(num_rows: int, num_heads: int, head_dim: int) -> int:
    """Return the size of what the programs make of their shares: float32, before it is merged."""
    return num_rows * num_heads * NUM_SPLITS * (head_dim + 2) * 4
