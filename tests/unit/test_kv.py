"""Layouts and planes; blocks and tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pdserve.kv import KvDtype, KvLayout, need
from pdserve.kv.savings import savings, worthwhile_context
from pdserve.shared.errors import KvBudgetTooSmall

WHOLE = KvLayout(24, 8, 128, 16, KvDtype.BFLOAT16)
RANK = WHOLE.parts(2, 2)[1]
SIZES = st.integers(1, 40)
TOKENS = st.integers(0, 400)


@pytest.mark.parametrize(
    ("layout", "fingerprint", "token_bytes", "block_bytes"),
    [
        (WHOLE, "d5622eaeb8186b7c65e9c728acd54ab5", 98304, 1572864),
        (RANK, "a191096a8def034ad65e78efb8c8b9e7", 24576, 393216),
        (WHOLE.parts(2, 2)[2], "ceaecda88283764fd0c74d04b3e400b7", 24576, 393216),
        (WHOLE.shard(15, 16), "6ace731530f9e8a69ef7cc8b0318a3e5", 12288, 196608),
        (KvLayout(2, 2, 16, 4, KvDtype.FLOAT32), "a1d6daeeef6e29c40826ebc5f1560caf", 512, 2048),
        (KvLayout(3, 1, 80, 32, KvDtype.FLOAT16), "0c667344caf919d4c3ab6469e7d252a4", 960, 30720),
    ],
)
def test_layouts_have_the_names_and_sizes_that_they_had(
    layout: KvLayout, fingerprint: str, token_bytes: int, block_bytes: int
) -> None:
    """Or nodes of this build and of the one before would refuse each other."""
    assert layout.fingerprint("m", "main") == fingerprint
    assert (layout.token_bytes, layout.block_bytes) == (token_bytes, block_bytes)
    assert layout.layer_bytes * layout.num_layers == block_bytes


def test_a_rank_has_its_part_of_each_plane() -> None:
    planes = [(plane.name, plane.layers, plane.heads, plane.row_bytes) for plane in RANK.planes]
    assert planes == [(name, range(12), range(4, 8), 256) for name in ("k", "v")]
    assert sum(plane.token_bytes for plane in RANK.planes) == RANK.token_bytes


@given(TOKENS, TOKENS, SIZES)
def test_tokens_need_the_blocks_that_they_are_in_and_fill_those_that_are_whole(
    begin: int, num_tokens: int, size: int
) -> None:
    end = begin + num_tokens
    blocks = [range(first, first + size) for first in range(0, end + size, size)]
    held = [n for n, block in enumerate(blocks) if block.start < end and block.stop > begin]
    full = [n for n in held if begin <= blocks[n].start and blocks[n].stop <= end]
    if num_tokens:
        assert list(need.block_range(begin, end, size)) == held
    assert list(need.full_range(begin, end, size)) == full
    if begin == 0:
        assert need.blocks_for(end, size) == len(held)
        assert need.full_blocks(end, size) == len(full)
        assert need.full_tokens(end, size) == need.tokens_in(len(full), size)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=5), SIZES, st.integers(1, 200))
def test_windows_hold_no_more_than_is_counted(lengths: list[int], size: int, window: int) -> None:
    """Of requests of any lengths, and less than a block of each too much."""
    layout = replace(WHOLE, block_size=size, windows=(window, window, 0) * 8)
    assert layout.num_companions == 2
    held = sum(map(layout.blocks_held, lengths)) * size / 3
    num_tokens, whole = (
        sum(lengths),
        sum(need.tokens_in(layout.blocks_for(n), size) for n in lengths),
    )
    counted = layout.held_tokens(whole, len(lengths))
    assert held <= counted + 1e-9
    assert layout.tokens_of_held(counted, len(lengths)) == pytest.approx(whole)
    alone = layout.held_tokens(num_tokens)
    assert alone == num_tokens or alone < num_tokens / 3 + layout.per_request.seen_tokens
    assert WHOLE.held_tokens(num_tokens, 3) == WHOLE.tokens_of_held(num_tokens, 3) == num_tokens


def test_a_state_counts_for_each_request() -> None:
    layout = replace(WHOLE, state_bytes=2 * WHOLE.block_bytes + 1)
    assert layout.blocks_held(33) == 3 + 3
    assert layout.held_tokens(100, 2) == 100 + 2 * 3 * 16
    assert layout.tokens_of_held(layout.held_tokens(100, 2), 2) == 100
    assert layout.fingerprint("m", "main") != WHOLE.fingerprint("m", "main")
    with pytest.raises(KvBudgetTooSmall, match="needs 7 blocks"):
        layout.blocks_in_budget(3 * WHOLE.block_bytes, 16)


def test_the_advice_changes_at_the_context_that_is_named() -> None:
    weight_bytes, batch = 3_000_000_000, 16
    context = worthwhile_context(WHOLE, weight_bytes, batch)
    assert 100 < context < 1000
    assert savings(WHOLE, weight_bytes, batch, context).startswith("with --kv-dtype int8 ")
    assert savings(WHOLE, weight_bytes, batch, context - 1).startswith("leave it as it is")
    assert savings(replace(WHOLE, dtype=KvDtype.FP8), weight_bytes, batch, 1) == "kept as fp8"


def test_a_row_of_codes_has_a_scale() -> None:
    coded = replace(WHOLE, dtype=KvDtype.INT8)
    assert coded.block_shape == (24, 2, 8, 16, 128 + 4)
    assert coded.block_bytes == 24 * 2 * 8 * 16 * 132
    assert coded.fingerprint("m", "main") != WHOLE.fingerprint("m", "main")
