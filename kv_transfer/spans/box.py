"""Which KV is to be moved, and where it is: boxes of KV, and runs of blocks in a pool.

A `Shard` says which heads to pull from which part, if two layouts can be converted to each other.
Block sizes may differ, and each side may have only some of the KV heads, with tensor parallelism,
or of the layers, with pipeline stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdserve.kv import KvLayout
from pdserve.shared.errors import LayoutMismatch

_MAX_ROWS: Final = 256  # that are remembered: every pull asks for the same ones


class KvBox(msgspec.Struct, frozen=True):
    """Which KV of a request: tokens x layers x KV heads of the model, each a half-open range."""

    begin: int  # token
    end: int
    first_layer: int
    end_layer: int
    first_head: int
    end_head: int

    @property
    def is_empty(self) -> bool:
        """Whether the box contains nothing."""
        return (
            self.begin >= self.end
            or self.first_layer >= self.end_layer
            or self.first_head >= self.end_head
        )

    @property
    def num_heads(self) -> int:
        """Number of KV heads."""
        return self.end_head - self.first_head

    def num_bytes(self, layout: KvLayout) -> int:
        """Bytes of the box, in any layout of the same model."""
        num_rows = (self.end_layer - self.first_layer) * self.num_heads
        return num_rows * layout.head_bytes * (self.end - self.begin)


def boxes_from(box: KvBox, begins: Sequence[int]) -> list[KvBox]:
    """Divide a box of layers of which each has a token of its own to begin with.

    Args:
        box: it begins no later than any of its layers.
        begins: of the model's layers.

    Returns:
        As few as there are, in ascending order of tokens; some may be empty.
    """
    layers = range(box.first_layer, box.end_layer)
    cuts = sorted({min(begins[layer], box.end) for layer in layers} | {box.end})
    boxes: list[KvBox] = []
    for begin, end in pairwise(cuts):
        own = [layer for layer in layers if begins[layer] <= begin]
        for _, run in groupby(enumerate(own), lambda pair: pair[1] - pair[0]):
            _, run_layers = zip(*run, strict=True)
            first, last = run_layers[0], run_layers[-1] + 1
            cut = {"begin": begin, "end": end, "first_layer": first, "end_layer": last}
            boxes.append(msgspec.structs.replace(box, **cut))
    return boxes


def whole_box(layout: KvLayout, begin: int, end: int) -> KvBox:
    """The box of everything that a pool of this layout has of tokens [begin, end)."""
    layers, heads = layout.layers, layout.heads
    return KvBox(begin, end, layers.start, layers.stop, heads.start, heads.stop)


class Rows(msgspec.Struct, frozen=True, eq=False):
    """The rows of a box in a block of some layout: one for each layer, plane and head.

    A row holds what one head has of the block's tokens, one slot after the other.
    """

    offsets: NDArray[np.int64]  # in the block: [num_layers, num_planes, num_heads]
    slot_bytes: NDArray[np.int64]  # of one token: [num_planes, 1]

    @classmethod
    def of(cls, layout: KvLayout, box: KvBox) -> Rows:
        """The rows of a box that the layout has."""
        layers = range(box.first_layer, box.end_layer)
        return _rows(layout, layers, range(box.first_head, box.end_head))


@lru_cache(_MAX_ROWS)
def _rows(layout: KvLayout, layers: range, heads: range) -> Rows:
    slot_bytes = np.array([[plane.row_bytes] for plane in layout.planes], dtype=np.int64)
    row_bytes = slot_bytes * layout.block_size
    begins = np.cumsum(row_bytes, axis=0) - row_bytes  # of the planes, if there were one head
    own_heads = np.arange(heads.start, heads.stop, dtype=np.int64) - layout.heads.start
    own_layers = np.arange(layers.start, layers.stop, dtype=np.int64) - layout.layers.start
    in_layer = begins * len(layout.heads) + own_heads * row_bytes
    return Rows(own_layers[:, None, None] * layout.layer_bytes + in_layer, slot_bytes)


class BlockRun(msgspec.Struct, frozen=True, eq=False):
    """Consecutive blocks of one request in one pool.

    Block `block_ids[i]` holds the tokens from `(first_block + i) * layout.block_size` on.
    """

    layout: KvLayout
    block_ids: NDArray[np.int64]
    first_block: int = 0

    def check_covers(self, box: KvBox) -> None:
        """Check that the blocks hold the whole box. Raises ValueError."""
        layout = self.layout
        layers, heads = layout.layers, layout.heads
        first = self.first_block * layout.block_size
        last = first + len(self.block_ids) * layout.block_size
        if box.begin < first or box.end > last:
            raise ValueError(
                f"tokens {box.begin}..{box.end} are not all in blocks for {first}..{last}"
            )
        if box.first_layer < layers.start or box.end_layer > layers.stop:
            raise ValueError(
                f"layers {box.first_layer}..{box.end_layer} are not all in "
                f"{layers.start}..{layers.stop}"
            )
        if box.first_head < heads.start or box.end_head > heads.stop:
            raise ValueError(
                f"KV heads {box.first_head}..{box.end_head} are not all in "
                f"{heads.start}..{heads.stop}"
            )


_MAX_PAIRS: Final = 256  # of layouts that are remembered: every pull asks for the same ones


def check_compatible(source: KvLayout, destination: KvLayout) -> None:
    """Check that KV can be converted from one layout to the other.

    Block sizes may differ, and each side may have only some of the heads, or of the layers.

    Raises:
        LayoutMismatch: the models differ, or they have no KV head or no layer in common; with both
            layouts.
    """
    _check_model(source, destination)
    if not common_heads(source, destination):
        raise LayoutMismatch(
            f"({source.describe()}) and ({destination.describe()}) have no KV head in common"
        )
    if not common_layers(source, destination):
        raise LayoutMismatch(
            f"({source.describe()}) and ({destination.describe()}) have no layer in common"
        )


@lru_cache(_MAX_PAIRS)
def common_heads(source: KvLayout, destination: KvLayout) -> range:
    """The model's KV heads that both pools hold."""
    return range(
        max(source.first_kv_head, destination.first_kv_head),
        min(source.end_kv_head, destination.end_kv_head),
    )


@lru_cache(_MAX_PAIRS)
def common_layers(source: KvLayout, destination: KvLayout) -> range:
    """The model's layers that both pools hold."""
    return range(
        max(source.first_layer, destination.first_layer),
        min(source.end_layer, destination.end_layer),
    )


def choose_shards(
    sources: Sequence[KvLayout], destination: KvLayout, rank: int = 0
) -> list[tuple[int, range]]:
    """Choose which heads to pull from which part of a node's pool, each head of a layer once.

    Returns (index of the source, KV heads of the model), ascending by layer, and then by head; the
    layers are `common_layers`. If several sources have the same heads, pullers of different `rank`
    choose different ones.

    Raises:
        LayoutMismatch: a source has another model, or no source has some of the heads or layers.
    """
    for source in sources:
        _check_model(source, destination)
    chosen: list[tuple[int, range]] = []
    layer = destination.first_layer
    while layer < destination.end_layer:
        stage = [n for n, each in enumerate(sources) if each.first_layer <= layer < each.end_layer]
        chosen += _choose_heads(sources, stage, layer, destination, rank)
        layer = sources[stage[0]].end_layer  # the ranks of a stage have the same layers
    return chosen


def _choose_heads(
    sources: Sequence[KvLayout], stage: list[int], layer: int, destination: KvLayout, rank: int
) -> list[tuple[int, range]]:
    """As choose_shards, from the sources of these numbers, which have this layer."""
    chosen: list[tuple[int, range]] = []
    head = destination.first_kv_head
    while head < destination.end_kv_head:
        holders = [n for n in stage if sources[n].first_kv_head <= head < sources[n].end_kv_head]
        if not holders:
            described = "; ".join(source.describe() for source in sources)
            raise LayoutMismatch(
                f"KV head {head} of layer {layer} of ({destination.describe()}) is in none of "
                f"({described})"
            )
        index = holders[rank % len(holders)]
        end = common_heads(sources[index], destination).stop
        chosen.append((index, range(head, end)))
        head = end
    return chosen


def _check_model(source: KvLayout, destination: KvLayout) -> None:
    if source.model_shape != destination.model_shape:
        raise LayoutMismatch(
            f"KV of ({source.describe()}) cannot be laid out as ({destination.describe()})"
        )
