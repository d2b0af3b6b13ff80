"""Layouts of ranks and stages, and from which of them to pull."""

from __future__ import annotations

from collections import Counter
from itertools import product

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kv_transfer.spans.box import check_compatible, choose_shards, common_layers
from pdserve.kv import KvDtype, KvLayout
from pdserve.shared.errors import LayoutMismatch


def model_of(num_heads: int, block_size: int = 4) -> KvLayout:
    return KvLayout(2, num_heads, 8, block_size, KvDtype.BFLOAT16)


def heads_of(layout: KvLayout) -> range:
    return range(layout.first_kv_head, layout.end_kv_head)


def layers_of(layout: KvLayout) -> range:
    return range(layout.first_layer, layout.end_layer)


def ranks_of(num_heads: int, num_ranks: int, block_size: int = 4) -> list[KvLayout]:
    whole = model_of(num_heads, block_size)
    return [whole.shard(rank, num_ranks) for rank in range(num_ranks)]


# ---- KvLayout.shard ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_heads", "num_ranks", "expected"),
    [
        (8, 1, [range(8)]),
        (8, 2, [range(4), range(4, 8)]),
        (8, 4, [range(2), range(2, 4), range(4, 6), range(6, 8)]),
        (2, 4, [range(1), range(1), range(1, 2), range(1, 2)]),
        (1, 2, [range(1), range(1)]),
    ],
)
def test_heads_are_split_or_replicated(
    num_heads: int, num_ranks: int, expected: list[range]
) -> None:
    layouts = ranks_of(num_heads, num_ranks)
    assert [heads_of(layout) for layout in layouts] == expected
    for layout in layouts:
        layout.check()
        assert layout.total_kv_heads == num_heads
        assert layout.block_bytes == model_of(len(heads_of(layout))).block_bytes


@given(st.integers(1, 9), st.integers(1, 9))
def test_every_layer_is_in_one_stage(num_layers: int, num_stages: int) -> None:
    whole = KvLayout(num_layers, 2, 8, 4, KvDtype.BFLOAT16)
    if num_stages > num_layers:
        with pytest.raises(LayoutMismatch, match="layers cannot be split"):
            whole.parts(1, num_stages)
        return
    stages = whole.parts(1, num_stages)
    assert [layer for stage in stages for layer in layers_of(stage)] == list(range(num_layers))
    assert sum(stage.block_bytes for stage in stages) == whole.block_bytes
    for stage in stages:
        stage.check()
        assert stage.model_shape == whole.model_shape


def test_the_fingerprint_of_a_whole_layout_is_that_of_builds_without_stages() -> None:
    assert model_of(4).fingerprint("m", "r") == "fa3401d88e987ff1747d8f521f91a1d2"
    stage = model_of(4).parts(1, 2)[0]
    assert stage.fingerprint("m", "r") != model_of(4).fingerprint("m", "r")


@given(st.integers(1, 16), st.integers(1, 16))
def test_every_head_is_on_equally_many_ranks(num_heads: int, num_ranks: int) -> None:
    assume(num_heads % num_ranks == 0 or num_ranks % num_heads == 0)
    held = Counter(head for layout in ranks_of(num_heads, num_ranks) for head in heads_of(layout))
    assert set(held) == set(range(num_heads))
    assert set(held.values()) == {max(1, num_ranks // num_heads)}


@pytest.mark.parametrize(("num_heads", "num_ranks"), [(6, 4), (4, 6), (3, 2)])
def test_heads_that_cannot_be_spread(num_heads: int, num_ranks: int) -> None:
    with pytest.raises(LayoutMismatch, match=f"{num_heads} KV heads .* over {num_ranks} ranks"):
        model_of(num_heads).shard(0, num_ranks)


# ---- KvLayout.check ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 0},
        {"num_kv_heads": -1},
        {"head_dim": 0},
        {"block_size": -4},
        {"block_size": 1 << 21},
        {"num_layers": 1 << 20, "head_dim": 1 << 20},  # blocks of terabytes
        {"first_kv_head": -1},
        {"first_kv_head": 1},  # of 4 heads at all
        {"model_kv_heads": 3},
        {"model_kv_heads": -(1 << 62)},
        {"model_kv_heads": 1 << 62},
        {"first_kv_head": (1 << 62), "model_kv_heads": 1 << 63},
    ],
)
def test_a_layout_that_cannot_be(changes: dict[str, int]) -> None:
    with pytest.raises(LayoutMismatch, match="not a KV layout"):
        msgspec.structs.replace(model_of(4), **changes).check()


anything = st.integers(-(1 << 63), 1 << 63) | st.integers(-2, 70)


@given(st.tuples(*[anything] * 5), st.none() | anything)
def test_a_layout_that_passes_can_be_computed_with(
    sizes: tuple[int, ...], model_kv_heads: int | None
) -> None:
    layers, heads, head_dim, block_size, first = sizes
    layout = KvLayout(layers, heads, head_dim, block_size, KvDtype.FLOAT32, first, model_kv_heads)
    try:
        layout.check()
    except LayoutMismatch:
        return
    assert 0 < layout.block_bytes <= 1 << 32
    assert 0 <= layout.first_kv_head < layout.end_kv_head <= layout.total_kv_heads
    check_compatible(layout, layout)


# ---- choose_shards -----------------------------------------------------------------------------


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[KvLayout], list[KvLayout]]:
    """The ranks of two nodes of one model, of any parallelism that it allows."""
    num_heads = draw(st.sampled_from([1, 2, 4, 6, 8]))
    degrees = [n for n in (1, 2, 3, 4, 8, 16) if num_heads % n == 0 or n % num_heads == 0]
    nodes = []
    for block_size in (4, 16):
        num_stages = draw(st.integers(1, model_of(num_heads).num_layers))
        whole = msgspec.structs.replace(model_of(num_heads), block_size=block_size)
        nodes.append(whole.parts(draw(st.sampled_from(degrees)), num_stages))
    return nodes[0], nodes[1]


@given(clusters())
def test_each_head_of_a_layer_is_taken_once_of_somebody_who_has_it(
    cluster: tuple[list[KvLayout], list[KvLayout]],
) -> None:
    sources, destinations = cluster
    for rank, destination in enumerate(destinations):
        chosen = choose_shards(sources, destination, rank)
        taken = [
            (layer, head)
            for index, heads in chosen
            for layer in common_layers(sources[index], destination)
            for head in heads
        ]
        assert sorted(taken) == list(product(layers_of(destination), heads_of(destination)))
        assert len(taken) == len(set(taken))
        for index, heads in chosen:
            assert set(heads) <= set(heads_of(sources[index]))
        indices = [index for index, _ in chosen]
        assert len(indices) == len(set(indices)), "a source is asked twice"


@given(clusters())
def test_replicas_are_used_evenly(cluster: tuple[list[KvLayout], list[KvLayout]]) -> None:
    sources, destinations = cluster
    pulls = Counter(
        (head, layer, index)
        for rank, destination in enumerate(destinations)
        for index, heads in choose_shards(sources, destination, rank)
        for layer in common_layers(sources[index], destination)
        for head in heads
    )
    for layer, head in product(range(sources[0].total_layers), range(sources[0].total_kv_heads)):
        holders = [
            number
            for number, source in enumerate(sources)
            if head in heads_of(source) and layer in layers_of(source)
        ]
        counts = [pulls[head, layer, index] for index in holders]
        assert max(counts) - min(counts) <= 1


def test_heads_that_nobody_has() -> None:
    sources = [model_of(4).shard(0, 4), model_of(4).shard(2, 4)]
    destination = model_of(4).shard(0, 2)
    with pytest.raises(LayoutMismatch, match="KV head 1") as caught:
        choose_shards(sources, destination)
    for layout in (*sources, destination):
        assert layout.describe() in str(caught.value)


def test_layers_that_nobody_has() -> None:
    sources, destination = model_of(4).parts(2, 2)[:2], model_of(4)
    with pytest.raises(LayoutMismatch, match="KV head 0 of layer 1") as caught:
        choose_shards(sources, destination)
    for layout in (*sources, destination):
        assert layout.describe() in str(caught.value)


def test_no_sources_at_all() -> None:
    with pytest.raises(LayoutMismatch, match="KV head 0 of layer 0"):
        choose_shards([], model_of(4))


@pytest.mark.parametrize("where", [0, 1])
def test_a_source_of_another_model_is_refused_with_both(where: int) -> None:
    sources = ranks_of(4, 2)
    sources[where] = msgspec.structs.replace(sources[where], head_dim=16)
    destination = model_of(4).shard(0, 2)  # takes of rank 0 only
    with pytest.raises(LayoutMismatch) as caught:
        choose_shards(sources, destination)
    assert sources[where].describe() in str(caught.value)
    assert destination.describe() in str(caught.value)


def test_stages_without_a_common_layer_are_not_compatible() -> None:
    with pytest.raises(LayoutMismatch, match="no layer in common"):
        check_compatible(*model_of(4).parts(1, 2))


def test_ranks_without_a_common_head_are_not_compatible() -> None:
    first, second = ranks_of(4, 2)
    with pytest.raises(LayoutMismatch, match="no KV head in common") as caught:
        check_compatible(first, second)
    assert first.describe() in str(caught.value)
    assert second.describe() in str(caught.value)
