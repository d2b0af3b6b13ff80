"""Which layouts of KV can be converted to each other, and which heads to pull from which part.

Block sizes may differ, and each side may have only some of the KV heads, with tensor parallelism,
or of the layers, with pipeline stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from pdserve.errors import LayoutMismatch
from pdserve.kv import KvLayout

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
