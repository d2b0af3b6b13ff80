"""The tracker of block states, against one that goes block by block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.lifecycle import (
    EXPORTER,
    PULLER,
    PULLER_MOVES,
    BlockStates,
    ExporterMove,
    IllegalMove,
    PullerMove,
    PullerState,
)

GROUPS = st.lists(st.integers(0, 5), unique=True)


@given(st.lists(st.tuples(GROUPS, st.sampled_from(PullerMove)), max_size=30))
def test_groups_move_as_their_blocks_would(moves: list[tuple[list[int], PullerMove]]) -> None:
    states, naive = BlockStates(PULLER, "r"), dict.fromkeys(range(6), PullerState.FREE)
    for block_ids, move in moves:
        if all((naive[b], move) in PULLER_MOVES for b in block_ids):
            states.move(block_ids, move)
            naive |= {b: PULLER_MOVES[naive[b], move] for b in block_ids}
        else:
            with pytest.raises(IllegalMove):
                states.move(block_ids, move)
        assert {b: states.state_of(b) for b in naive} == naive


def test_an_illegal_move_names_all_that_is_needed_to_find_the_bug() -> None:
    states = BlockStates(PULLER, "request 7")
    states.move([4, 5], PullerMove.RESERVE)
    states.move([5], PullerMove.PULL)
    with pytest.raises(IllegalMove) as error:
        states.move([4, 5], PullerMove.RELEASE)
    assert str(error.value) == (
        "request 7: puller's block 5 is pulling, so it cannot release; "
        "it could validate part or validate or fail"
    )


def test_a_block_named_twice_would_be_held_twice() -> None:
    with pytest.raises(IllegalMove, match="names a block twice"):
        BlockStates(EXPORTER, "r").move([1, 1], ExporterMove.HOLD)


def test_what_is_left_behind_is_named() -> None:
    states = BlockStates(PULLER, "r")
    states.move([1, 2, 3], PullerMove.RESERVE)
    states.move([1], PullerMove.ADOPT_BLANK)
    states.move([2], PullerMove.RELEASE)
    with pytest.raises(AssertionError, match=r"r has left .*\{'reserved': \[3\]\}"):
        states.check_ended()
    states.move([3], PullerMove.RELEASE)
    states.check_ended()


def test_an_adopted_block_is_given_back_by_nobody_but_the_engine() -> None:
    states = BlockStates(PULLER, "r")
    states.move([1], PullerMove.REUSE)
    states.move([1], PullerMove.ADOPT)
    with pytest.raises(IllegalMove, match="it could do nothing"):
        states.move([1], PullerMove.RELEASE)
