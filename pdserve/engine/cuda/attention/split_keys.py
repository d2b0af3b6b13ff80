"""How many programs share the keys of a decode step (`triton_attention.py`). No Triton here."""

from __future__ import annotations

from typing import Final

MIN_SPLIT_KEYS: Final = 256  # below this a program costs more than it saves
WIDE: Final = 256  # numbers of a key: of wider ones, fewer heads fit into a program's registers
_FEWEST: Final = 16
_MOST: Final = 64  # what is merged at a time has to fit into registers
_PROGRAMS: Final = 128  # for one row: they fill an H100
_LEAST_HEADS: Final = 16  # of a tile: the smallest matrix instruction has as many rows


def num_splits(num_tiles: int) -> int:
    """Return how many programs share a row's keys, at most: a power of two.

    With the fewer heads of one rank among several, more programs for each fill its GPU.

    Args:
        num_tiles: of heads, that have programs of their own: KV heads, or parts of their groups.
    """
    wanted = -(-_PROGRAMS // num_tiles)
    return min(_MOST, max(_FEWEST, 1 << (wanted - 1).bit_length()))


def tile_heads(group_size: int, head_dim: int) -> int:
    """Return how many heads of a KV head's group one program has: a power of two.

    All of them, unless their rows are wide, as those of latent attention are.
    """
    least = 1 << (max(group_size, _LEAST_HEADS) - 1).bit_length()
    return least if head_dim <= WIDE else _LEAST_HEADS


def partial_bytes(
    num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int
) -> int:
    """Return the size of what the programs make of their shares: float32, before it is merged."""
    group_size = num_heads // num_kv_heads
    num_tiles = num_kv_heads * -(-group_size // tile_heads(group_size, head_dim))
    return num_rows * num_heads * num_splits(num_tiles) * (value_dim + 2) * 4
