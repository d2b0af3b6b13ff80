"""Random layouts, blocks and boxes to plan pulls for."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from kv_transfer.spans.box import BlockRun, KvBox, common_heads, common_layers
from kv_transfer.spans.plan import Spans
from pdserve.kv import KvDtype, KvLayout

NUM_BLOCKS = 40

Plan = tuple[BlockRun, BlockRun, KvBox]


@st.composite
def shards(draw: st.DrawFn, model: KvLayout, block_size: int) -> KvLayout:
    """A rank of TP 1, 2 or 4 of the model, its heads split or replicated, in one of some stages."""
    heads = model.num_kv_heads
    sizes = [n for n in (1, 2, 4) if heads % n == 0 or n % heads == 0]
    num_ranks = draw(st.sampled_from(sizes))
    whole = msgspec.structs.replace(model, block_size=block_size)
    num_stages = draw(st.integers(1, model.num_layers))
    return draw(st.sampled_from(whole.parts(num_ranks, num_stages)))


@st.composite
def part_of(draw: st.DrawFn, whole: range) -> range:
    """A part of it that is not empty, often all."""
    first = draw(st.integers(whole.start, whole.stop - 1) | st.just(whole.start))
    return range(first, draw(st.integers(first + 1, whole.stop) | st.just(whole.stop)))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """(source, destination, box), the source beginning at any block of it."""
    layers, heads = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 4, 8]))
    is_latent, dtype = draw(st.booleans()), draw(st.sampled_from(KvDtype))
    heads = 1 if is_latent else heads
    model = KvLayout(layers, heads, draw(st.integers(1, 3)), 1, dtype, is_latent=is_latent)
    sizes = draw(st.tuples(st.integers(1, 8), st.integers(1, 8)))
    if draw(st.booleans()):
        sizes = (sizes[0], sizes[0])
    source, destination = (draw(shards(model, size)) for size in sizes)
    assume(common_heads(source, destination))
    assume(common_layers(source, destination))
    common = draw(part_of(common_heads(source, destination)))
    of_layers = draw(part_of(common_layers(source, destination)))
    begin = draw(st.integers(0, 20))
    end = begin + draw(st.integers(1, 20))
    first_block = draw(st.integers(0, begin // source.block_size))
    ids = st.permutations(range(NUM_BLOCKS)) | st.just(list(range(NUM_BLOCKS)))
    source_ids = draw(ids)[: source.blocks_for(end) - first_block]
    table = draw(ids)[: destination.blocks_for(end)]
    return (
        BlockRun(source, np.array(source_ids, dtype=np.int64), first_block),
        BlockRun(destination, np.array(table, dtype=np.int64)),
        KvBox(begin, end, of_layers.start, of_layers.stop, common.start, common.stop),
    )


def copied(spans: Spans, source: np.ndarray, destination_bytes: int) -> np.ndarray:
    destination = np.full(destination_bytes, 0xEE, dtype=np.uint8)
    for source_offset, offset, nbytes in spans:
        assert (destination[offset : offset + nbytes] == 0xEE).all(), "a byte is written twice"
        destination[offset : offset + nbytes] = source[source_offset : source_offset + nbytes]
    return destination


def in_box(data: np.ndarray, layout: KvLayout, box: KvBox) -> np.ndarray:
    """A view of the box's layers and heads in what `tokens_of` has returned."""
    first = layout.first_kv_head
    heads = slice(box.first_head - first, box.end_head - first)
    layers = slice(box.first_layer - layout.first_layer, box.end_layer - layout.first_layer)
    return data[:, layers, :, heads]
