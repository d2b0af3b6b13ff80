"""What is kept free at admission, and the estimate of how long answers get."""

from __future__ import annotations

import pytest

from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.kv.shortage import KvHeadroom
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Queues
from pdserve.lifecycle import Targets
from pdserve.measured.output_lengths import OutputLengths
from pdserve.protocol import FinishReason
from pdserve.settings.config import Headroom
from pdserve.shared.clock import ManualClock
from tests.requests import make_request

BLOCK = 4


def stream(num_prompt: int, num_outputs: int = 1, max_tokens: int = 100) -> Request:
    """A decoding request with the blocks that it needs now."""
    request = make_request(num_prompt, max_tokens=max_tokens, output_token_ids=[1] * num_outputs)
    request.num_computed_tokens = request.num_tokens - 1
    request.block_table = list(range(-(-request.num_tokens // BLOCK)))
    return request


def make_headroom(
    name: Headroom, mean_tokens: float = 100.0, num_watermark_blocks: int = 0
) -> KvHeadroom:
    headroom = KvHeadroom(BLOCK, name, num_watermark_blocks)
    headroom.lengths = OutputLengths(mean_tokens)
    return headroom


@pytest.mark.parametrize("name", ["greedy", "reserve-static", "reserve-dynamic"])
def test_a_request_alone_needs_nothing_beside_it(name: Headroom) -> None:
    assert make_headroom(name, num_watermark_blocks=5).num_kept_free([], stream(4)) == 0


def test_greedy_keeps_a_block_for_each_stream() -> None:
    streams = [stream(7), stream(7, 30)]
    newcomer = make_request(4)
    assert make_headroom("greedy").num_kept_free(streams, newcomer) == 2
    assert make_headroom("greedy", num_watermark_blocks=3).num_kept_free(streams, newcomer) == 5


def test_reserve_static_keeps_all_that_max_tokens_allows() -> None:
    headroom = make_headroom("reserve-static")
    # 8 tokens in 2 blocks, 19 more to come: 27 in 7. The newcomer: 4 and 20 are 24, in 6 for 1.
    assert headroom.num_kept_free([stream(7, 1, 20)], make_request(4, max_tokens=20)) == 5 + 5


def test_reserve_dynamic_keeps_what_is_expected_until_the_ends() -> None:
    headroom = make_headroom("reserve-dynamic", mean_tokens=41)
    # Both have 40 to come, and take 10 blocks for them, 11 from where they are.
    assert headroom.num_kept_free([stream(7), stream(7)], None) == 22


def test_reserve_dynamic_counts_on_the_blocks_of_those_that_end_before() -> None:
    headroom = make_headroom("reserve-dynamic", mean_tokens=1000)
    ends_soon, goes_on = stream(80, 1, 5), stream(8, 1, 41)
    # In 4 tokens: a block and perhaps one more each. In 40: 11 for the second, 21 are back by then.
    assert headroom.num_kept_free([ends_soon, goes_on], None) == 4
    assert make_headroom("reserve-static").num_kept_free([ends_soon, goes_on], None) == 1 + 10


def test_the_estimate_follows_answers_that_end_and_no_others() -> None:
    queues = Queues(BlockPool(100, BLOCK), ManualClock())
    before = queues.headroom.lengths.mean_tokens
    cancelled = make_request(4, output_token_ids=[1] * 10)
    leg = make_request(4, output_token_ids=[1], leg_token_limit=1)
    leg.finish_reason = FinishReason.STOP
    for request in (cancelled, leg):
        queues.running.append(request)
        queues.remove(request)
    assert queues.headroom.lengths.mean_tokens == before
    for _ in range(200):
        ended = make_request(4, output_token_ids=[1] * 10)
        ended.finish_reason = FinishReason.STOP
        queues.running.append(ended)
        queues.remove(ended)
    assert queues.headroom.lengths.mean_tokens == pytest.approx(10, abs=0.1)


def test_admission_leaves_what_is_kept_free() -> None:
    headroom = KvHeadroom(BLOCK, "reserve-static")
    queues = Queues(BlockPool(20, BLOCK), ManualClock(), headroom)
    first, second = make_request(8, max_tokens=12), make_request(8, max_tokens=12)
    for request in (first, second):
        queues.submit(request)
        assert queues.admit(request)
    # 5 blocks each at their ends; 4 of 20 are taken.
    assert queues.reserve(4 * 10, []) is not None
    assert queues.reserve(1, []) is None


def test_what_is_on_its_way_here_will_grow_too() -> None:
    queues = Queues(BlockPool(10, BLOCK), ManualClock())
    arriving = stream(8, max_tokens=4)
    queues.arriving.add(arriving)
    assert queues.reserve(10 * BLOCK, []) is None
    assert queues.reserve(9 * BLOCK, []) is not None


def test_a_prefill_leg_needs_no_room_to_grow() -> None:
    headroom = KvHeadroom(BLOCK, "reserve-static")
    queues = Queues(BlockPool(10, BLOCK), ManualClock(), headroom)
    queues.running.append(stream(4, 4, max_tokens=4))  # has got all its tokens
    leg, local = make_request(36, max_tokens=8, leg_token_limit=1), make_request(36, max_tokens=8)
    assert queues.num_missing(leg) == 0
    assert queues.num_missing(local) > 0


@pytest.mark.parametrize(
    ("running", "newcomer", "is_room"), [(0, 1, True), (1, 1, False), (1, 0, False)]
)
def test_nothing_is_kept_free_for_what_is_less_important(
    running: int, newcomer: int, is_room: bool
) -> None:
    """It gives way once a block is needed: its growth keeps nobody out that goes before it."""
    queues = Queues(BlockPool(10, BLOCK), ManualClock(), KvHeadroom(BLOCK, "reserve-static"))
    grows = make_request(8, max_tokens=20, targets=Targets(priority=running))
    queues.submit(grows)
    assert queues.admit(grows)  # 2 blocks, and 7 at its end
    comes = make_request(20, max_tokens=4, targets=Targets(priority=newcomer))
    assert (queues.num_missing(comes) == 0) is is_room
