"""How far KV has come: against a naive set of (token, layer) pairs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.lifecycle import KvPart, Progress
from pdserve.shared.errors import MalformedMessage

NUM_LAYERS = 5


def cells(part: KvPart) -> set[tuple[int, int]]:
    tokens = range(part.first_token, part.end_token)
    return {(token, layer) for token in tokens for layer in part.layers}


@given(
    steps=st.lists(
        st.tuples(st.integers(1, 6), st.lists(st.integers(1, NUM_LAYERS - 1)), st.booleans())
    ),
    max_tokens=st.integers(1, 7),
)
def test_a_prompt_is_announced_once_and_in_order_whatever_steps_fail(
    steps: list[tuple[int, list[int], bool]], max_tokens: int
) -> None:
    """Each step: how many tokens, after which layers one asks, and whether it fails after them.

    What completes tokens may come in pieces.
    """
    announced, pulled = Progress(NUM_LAYERS), Progress(NUM_LAYERS)
    seen: set[tuple[int, int]] = set()
    num_computed = 0
    for num_tokens, ends, fails in steps:
        for num_layers in [*sorted(set(ends)), *([] if fails else [NUM_LAYERS])]:
            parts = announced.until(num_computed + num_tokens, num_layers)
            if num_layers == NUM_LAYERS:
                parts = [piece for part in parts for piece in part.pieces(max_tokens)]
                assert all(part.end_token - part.first_token <= max_tokens for part in parts)
            for part in parts:
                assert cells(part)
                assert not cells(part) & seen, "announced twice"
                assert part.end_token <= num_computed + num_tokens
                assert part.end_layer <= num_layers
                seen |= cells(part)
                announced.take(part)
                pulled.take(part)
        num_computed += 0 if fails else num_tokens
        assert announced.num_tokens == pulled.num_tokens == num_computed
        complete = {(t, layer) for t in range(num_computed) for layer in range(NUM_LAYERS)}
        assert complete <= seen
        assert set().union(*map(cells, announced.whole())) == seen


@pytest.mark.parametrize(
    "part",
    [
        KvPart(0, 8, 0, 5),  # again
        KvPart(9, 12, 0, 5),  # a token is missing
        KvPart(8, 12, 1, 5),  # a layer of the chunk that has begun comes twice
        KvPart(8, 12, 3, 5),  # one is missing
        KvPart(8, 13, 2, 5),  # for more tokens than the chunk has
        KvPart(8, 10, 2, 4),  # some layers for a part of the chunk
        KvPart(12, 14, 0, 5),  # the chunk has not ended
    ],
)
def test_what_does_not_follow_is_refused(part: KvPart) -> None:
    progress = Progress(NUM_LAYERS)
    progress.take(KvPart(0, 8, 0, 5))
    progress.take(KvPart(8, 12, 0, 2))
    with pytest.raises(MalformedMessage, match="after 8 tokens and 2 layers of those up to 12"):
        progress.take(part)
    progress.take(KvPart(8, 12, 2, 5))
    assert progress.num_tokens == 12
