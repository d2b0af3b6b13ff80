"""The real `BlockPool`, made to start from any state and to leave its state behind as a value.

A search visits the same few pool states over and over, so every verb's outcome is remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, TypeVar

from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.scheduler import Queues
from pdserve.shared.clock import ManualClock

T = TypeVar("T")
BLOCK_SIZE = 1  # so that tokens and blocks are counted alike


class PoolState(NamedTuple):
    """All that a BlockPool knows, hashable; every field as the attribute of that name."""

    references: tuple[int, ...]
    uncached: tuple[int, ...]
    cached: tuple[int, ...]
    hash_of: tuple[tuple[int, bytes], ...]  # ascending by block

    @property
    def num_referenced(self) -> int:
        return sum(1 for count in self.references if count)

    def renamed(self, names: Sequence[int]) -> PoolState:
        """The same with block `b` called `names[b]`."""
        references = [0] * len(names)
        for block_id, count in enumerate(self.references):
            references[names[block_id]] = count
        return PoolState(
            tuple(references),
            tuple(names[b] for b in self.uncached),
            tuple(names[b] for b in self.cached),
            tuple(sorted((names[b], h) for b, h in self.hash_of)),
        )


class Outcome(NamedTuple):
    """What a verb left behind."""

    state: PoolState
    bumped: tuple[int, ...]  # blocks whose generation it bumped, in order


@cache
def new_pool(num_blocks: int) -> PoolState:
    return _state_of(BlockPool(num_blocks, BLOCK_SIZE))


@cache
def reserve(
    state: PoolState, num_blocks: int, hashes: tuple[bytes, ...]
) -> tuple[Outcome, tuple[int, ...], int] | None:
    """As `Queues.reserve` of an idle engine: (outcome, block table, reused blocks), or None."""
    outcome, reserved = _run(
        state, lambda pool: Queues(pool, ManualClock(0.0)).reserve(num_blocks, hashes)
    )
    return None if reserved is None else (outcome, tuple(reserved[0]), reserved[1])


@cache
def retain(state: PoolState, block_ids: tuple[int, ...]) -> Outcome:
    return _run(state, lambda pool: pool.retain(block_ids))[0]


@cache
def release(state: PoolState, block_ids: tuple[int, ...]) -> Outcome:
    return _run(state, lambda pool: pool.release(block_ids))[0]


@cache
def publish(state: PoolState, block_id: int, block_hash: bytes) -> Outcome:
    return _run(state, lambda pool: pool.publish(block_id, block_hash))[0]


@cache
def take_prefix(state: PoolState, hashes: tuple[bytes, ...]) -> tuple[Outcome, tuple[int, ...]]:
    outcome, taken = _run(state, lambda pool: pool.take_prefix(hashes))
    return outcome, tuple(taken)


@cache
def allocate(state: PoolState, num_blocks: int) -> tuple[Outcome, tuple[int, ...]] | None:
    """(outcome, blocks), or None: there are not so many."""
    if num_blocks > len(state.uncached) + len(state.cached):
        return None
    outcome, taken = _run(state, lambda pool: pool.allocate(num_blocks))
    return outcome, tuple(taken)


@cache
def take_all(state: PoolState) -> Outcome:
    """Other requests take whatever is free, and give it back: nothing is cached any more."""
    return _run(state, lambda pool: pool.release(pool.allocate(pool.num_free)))[0]


@cache
def come_and_go(state: PoolState) -> Outcome:
    """Other requests take whatever is free and not cached, and give it back in another order."""

    def verb(pool: BlockPool) -> None:
        taken = pool.allocate(pool.num_free - pool.num_cached)
        pool.release(taken[1:])
        pool.release(taken[:1])

    return _run(state, verb)[0]


def _run(state: PoolState, verb: Callable[[BlockPool], T]) -> tuple[Outcome, T]:
    bumped: list[int] = []
    pool = BlockPool(len(state.references), BLOCK_SIZE, bump_generations=bumped.extend)
    pool._references = list(state.references)
    pool._uncached = list(state.uncached)
    pool._cached = OrderedDict.fromkeys(state.cached)
    pool._hash_of = dict(state.hash_of)
    pool._block_of = {h: b for b, h in state.hash_of}
    result = verb(pool)
    pool.check_integrity()
    return Outcome(_state_of(pool), tuple(bumped)), result


def _state_of(pool: BlockPool) -> PoolState:
    return PoolState(
        tuple(pool._references),
        tuple(pool._uncached),
        tuple(pool._cached),
        tuple(sorted(pool._hash_of.items())),
    )
