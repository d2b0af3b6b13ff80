"""What prefixes may take of a pool, and what is left to the requests that run here."""

from __future__ import annotations

from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.scheduler import Queues
from pdserve.node.prefixes.headroom import Headroom, num_spoken_for
from pdserve.shared.clock import ManualClock
from tests.requests import make_request

BLOCK = 4
NUM_BLOCKS = 10
HASHES = [number.to_bytes(16) for number in range(6)]


def cached(pool: BlockPool) -> None:
    """Six blocks of a prefix, which nobody uses."""
    blocks = pool.allocate(len(HASHES))
    for block_id, block_hash in zip(blocks, HASHES, strict=True):
        pool.publish(block_id, block_hash)
    pool.release(blocks)


def test_a_running_request_may_grow_by_a_block() -> None:
    queues = Queues(BlockPool(NUM_BLOCKS, BLOCK), ManualClock())
    for _ in range(3):
        queues.waiting.append(make_request(5))
        assert queues.admit(queues.waiting[0])
    assert num_spoken_for(queues) == 3


def test_nothing_goes_past_the_head_of_the_queue() -> None:
    queues = Queues(BlockPool(NUM_BLOCKS, BLOCK), ManualClock())
    headroom = Headroom(queues.pool, lambda: num_spoken_for(queues))
    running = queues.pool.allocate(4)
    queues.waiting.extend([make_request(17), make_request(4)])  # five blocks, and one
    assert headroom.num_spare == 1
    running += queues.pool.allocate(3)
    assert not queues.admit(queues.waiting[0])
    assert headroom.num_spare == 0


def test_while_a_policy_keeps_prompts_out_nothing_is_spare() -> None:
    queues = Queues(BlockPool(NUM_BLOCKS, BLOCK), ManualClock())
    headroom = Headroom(queues.pool, lambda: num_spoken_for(queues))
    queues.held_back.start()
    assert headroom.num_spare == 0
    queues.held_back.stop()
    assert headroom.num_spare == NUM_BLOCKS


def test_blocks_that_are_in_use_cost_nothing() -> None:
    pool = BlockPool(NUM_BLOCKS, BLOCK)
    cached(pool)
    headroom = Headroom(pool, lambda: NUM_BLOCKS - 2)
    assert len(headroom.match_prefix(HASHES)) == 2
    in_use = pool.take_prefix(HASHES[:3])
    assert headroom.num_spare == 0
    assert headroom.take_prefix(HASHES) == in_use
    pool.release(in_use)
    pool.release(in_use)
    assert pool.num_free == NUM_BLOCKS
