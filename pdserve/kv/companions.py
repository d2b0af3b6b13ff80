"""Blocks of one pool for layers that see all tokens, and for layers that see the last few.

    layers     L L G L L G         G sees all tokens, L has a window
    first      G G                 of each stretch of tokens: one block ...
    companions L L   L L           ... and as many more as the other layers take

All are blocks of one pool, of equal bytes. A request's block table has the first ones; a companion
is given back as soon as none of its tokens is in the window of anything that is still to come. In
models where every layer has a window, some layers stay in first blocks all the same: blocks are
named, hashed and counted by these.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

# [num_blocks, num_companions]: of each first block; NONE: it has been given back
Companions: TypeAlias = NDArray[np.int32]

NONE: Final = -1
_KEPT: Final = 8  # one layer of so many stays, if all have windows
_WASTE: Final = 6  # at most one layer's room of so many stays empty


class Place(NamedTuple):
    """Where a layer's KV is, of a stretch of tokens."""

    block: int  # 0: the first one; n: its companion n - 1
    layer: int  # of those in it


def are_in_one(windows: tuple[int, ...]) -> bool:
    """Whether blocks have no companions."""
    return not windows or max(place.block for place in places(windows)) == 0


@lru_cache(maxsize=64)
def places(windows: tuple[int, ...]) -> tuple[Place, ...]:
    """Return where the KV of each layer is; all in one block, if companions are not worth it.

    Args:
        windows: of the model's layers, in tokens; 0: a layer sees all.
    """
    every = range(len(windows))
    kept = [layer for layer in every if not windows[layer]]
    if not kept:
        kept = list(every[: max(1, len(windows) // _KEPT)])
    others = sorted(set(every) - set(kept))
    size = len(kept)
    num_empty = -len(others) % size
    if not others or num_empty * _WASTE > len(windows):
        return tuple(Place(0, layer) for layer in every)
    found = {layer: Place(0, index) for index, layer in enumerate(kept)}
    for number, layer in enumerate(others):
        found[layer] = Place(1 + number // size, number % size)
    return tuple(found[layer] for layer in every)


def windows_worth_it(windows: Sequence[int | None], max_model_len: int) -> tuple[int, ...]:
    """Return the windows by which a pool gives blocks back; (): it does not.

    Args:
        windows: of the model's layers; None: a layer sees all.
        max_model_len: tokens of a request. A window that is no smaller is none.
    """
    found = tuple(w if w is not None and w < max_model_len else 0 for w in windows)
    return () if are_in_one(found) else found


def made_up(num_blocks: int, num_companions: int) -> Companions | None:
    """Return companions for each block before any was allocated: some block; None: it has none.

    Steps that only warm up or measure take any blocks. Of the first ones, all are different.
    """
    if num_companions == 0:
        return None
    firsts = np.arange(num_blocks)[:, None] * num_companions
    blocks = firsts + np.arange(num_companions)
    return (blocks % num_blocks).astype(np.int32)
