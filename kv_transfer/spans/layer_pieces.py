"""Boxes of pools that have several blocks for the same tokens, each with some of the layers.

A piece is a box whose layers are next to each other in one block, on both sides. There each pool is
like one that has these layers alone: what spans are planned for (`plan.py`).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import msgspec

from kv_transfer.spans.box import KvBox
from pdserve.kv import KvLayout
from pdserve.shared.errors import TicketInvalid


def pieces(box: KvBox, *layouts: KvLayout) -> list[KvBox]:
    """Cut a box into pieces, in the order of layers; it is one itself without companions."""
    if not any(layout.num_companions for layout in layouts):
        return [box]
    borders = _borders(layouts)
    inside = [border for border in borders if box.first_layer < border < box.end_layer]
    cuts = [box.first_layer, *inside, box.end_layer]
    return [
        msgspec.structs.replace(box, first_layer=first, end_layer=end)
        for first, end in pairwise(cuts)
    ]


def part_of(layout: KvLayout, piece: KvBox) -> tuple[KvLayout, int]:
    """Return the layout of the blocks that have a piece, and which of each stretch's blocks.

    0 are the first ones, n their companions n - 1.

    Raises:
        TicketInvalid: it is not a piece.
    """
    if not layout.num_companions:
        return layout, 0
    if pieces(piece, layout) != [piece]:
        raise TicketInvalid(f"{piece} is not all in one block of ({layout.describe()})")
    return _part(layout, piece.first_layer), layout.places[piece.first_layer].block


@lru_cache(maxsize=256)
def _part(layout: KvLayout, first_layer: int) -> KvLayout:
    """As if the pool had as many layers as a block has room for, of which one is this."""
    return msgspec.structs.replace(
        layout,
        num_layers=layout.block_layers,
        first_layer=first_layer - layout.places[first_layer].layer,
        model_layers=layout.total_layers,
        windows=(),
    )


@lru_cache(maxsize=256)
def _borders(layouts: tuple[KvLayout, ...]) -> list[int]:
    """The layers that do not follow the one before in some layout."""
    found: set[int] = set()
    for layout in layouts:
        for layer, (before, own) in enumerate(pairwise(layout.places), layout.first_layer + 1):
            if own != (before.block, before.layer + 1):
                found.add(layer)
    return sorted(found)
