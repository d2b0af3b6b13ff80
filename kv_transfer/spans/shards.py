"""Which layouts of KV can be converted to each other, and which heads to pull from which shard.

Block sizes may differ, and with tensor parallelism each side may have only some of the KV heads.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.errors import LayoutMismatch
from pdserve.kv_layout import KvLayout


def check_compatible(source: KvLayout, destination: KvLayout) -> None:
    """Check that KV can be converted from one layout to the other.

    Block sizes may differ, and each side may have only some of the heads.

    Raises:
        LayoutMismatch: the models differ, or they have no KV head in common; with both layouts.
    """
    _check_model(source, destination)
    if not common_heads(source, destination):
        raise LayoutMismatch(
            f"({source.describe()}) and ({destination.describe()}) have no KV head in common"
        )


def common_heads(source: KvLayout, destination: KvLayout) -> range:
    """The model's KV heads that both pools hold."""
    return range(
        max(source.first_kv_head, destination.first_kv_head),
        min(source.end_kv_head, destination.end_kv_head),
    )


def choose_shards(
    sources: Sequence[KvLayout], destination: KvLayout, rank: int = 0
) -> list[tuple[int, range]]:
    """Choose which heads to pull from which tensor-parallel rank, each head once.

    Returns (index of the source, KV heads of the model), ascending by head. If several sources have
    the same heads, pullers of different `rank` choose different ones.

    Raises:
        LayoutMismatch: a source has another model, or no source has some of the heads.
    """
    for source in sources:
        _check_model(source, destination)
    chosen: list[tuple[int, range]] = []
    head = destination.first_kv_head
    while head < destination.end_kv_head:
        holders = [
            index
            for index, source in enumerate(sources)
            if source.first_kv_head <= head < source.end_kv_head
        ]
        if not holders:
            described = "; ".join(source.describe() for source in sources)
            raise LayoutMismatch(
                f"KV head {head} of ({destination.describe()}) is in none of ({described})"
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
