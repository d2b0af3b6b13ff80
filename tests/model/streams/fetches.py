"""KV from the other node, and for it: `pdserve/node/prefixes` in the small.

A query and its answer are one move here, and so are a fetch's end and its settle: a lease may end
at any time, so blocks may be freed before, during and after every copy anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.model import pools
from tests.model.streams.world import (
    Config,
    Fetch,
    Hold,
    Kind,
    Message,
    Move,
    Mutation,
    World,
    hashes,
)
from tests.model.world import NOBODY, replaced


class FetchRules:
    """Every method gives a new world."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._mutation = config.mutation

    # ---- what can happen -----------------------------------------------------------------------

    def progress(self, world: World, node: int) -> Iterator[Move]:
        """What goes on by itself."""
        here = world.nodes[node]
        is_busy = any(fetch.is_begun for fetch in here.fetches)
        for fetch in here.fetches:
            name = _name(node, fetch)
            is_cut_off = fetch.source != NOBODY and not world.nodes[fetch.source].is_up
            if not fetch.is_begun:
                if not is_busy:  # the same blocks are fetched once
                    yield f"{name} begins", partial(self._begin, world, node, fetch)
            elif is_cut_off:
                yield f"{name} has lost its source", partial(self.end, world, node, fetch)
            elif fetch.sources:
                yield from self._pull(world, node, fetch, name)
        if self._mutation is not Mutation.NO_LEASE:
            for hold in here.holds:
                yield f"a lease on {node} is over", partial(self._drop, world, node, hold)

    def hazards(self, world: World, node: int) -> Iterator[Move]:
        """What may happen, or not."""
        for fetch in world.nodes[node].fetches:
            yield f"{_name(node, fetch)} takes too long", partial(self.end, world, node, fetch)

    def cancel(
        self, world: World, node: int, attempt: int, *, only_prefetch: bool = False
    ) -> World:
        """Of a leg, or of one that might have come; nobody waits for the outcome."""
        for fetch in world.nodes[node].fetches:
            if fetch.attempt == attempt and (fetch.is_prefetch or not only_prefetch):
                world = self.end(world, node, fetch, is_told=False)
        return world

    # ---- parts ---------------------------------------------------------------------------------

    def _drop(self, world: World, node: int, hold: Hold) -> World:
        held = world.nodes[node].holds
        index = held.index(hold)
        holds = (*held[:index], *held[index + 1 :])
        return self._release(world.with_node(node, holds=holds), node, hold.blocks)

    def _begin(self, world: World, node: int, fetch: Fetch) -> World:
        """Take what is here; have the other node hold the rest, and take blocks for it."""
        wanted = hashes(fetch.num_blocks)
        outcome, blocks = pools.take_prefix(world.nodes[node].pool, wanted)
        world = world.with_pool(node, outcome, self._config)
        begun = fetch._replace(is_begun=True, blocks=blocks, num_here=len(blocks))
        world = _with_fetch(world, node, begun)
        if len(blocks) == fetch.num_blocks or fetch.source == NOBODY:
            return self.end(world, node, begun)
        held, sources = pools.take_prefix(world.nodes[fetch.source].pool, wanted[len(blocks) :])
        taken = pools.allocate(world.nodes[node].pool, len(sources))
        if not sources or taken is None:
            return self.end(world, node, begun)
        world = world.with_pool(node, taken[0], self._config)
        world = world.with_pool(fetch.source, held, self._config)
        hold = Hold(fetch.attempt, fetch.is_prefetch, sources)
        holds = (*world.nodes[fetch.source].holds, hold)
        world = world.with_node(fetch.source, holds=holds)
        present = world.nodes[fetch.source].generations
        begun = begun._replace(
            blocks=blocks + taken[1],
            sources=sources,
            expected=tuple(present[block_id] for block_id in sources),
        )
        return _with_fetch(world, node, begun)

    def _pull(self, world: World, node: int, fetch: Fetch, name: str) -> Iterator[Move]:
        can_copy = fetch.num_copied < len(fetch.sources)
        if self._mutation is Mutation.COMPARE_FIRST:
            can_copy = can_copy and fetch.is_compared
        if can_copy:
            yield f"{name} copies a block", partial(self._copy, world, node, fetch)
        else:
            yield f"{name} compares", partial(self._compare, world, node, fetch)

    def _copy(self, world: World, node: int, fetch: Fetch) -> World:
        number = fetch.num_copied
        row = world.nodes[fetch.source].cells[fetch.sources[number]]
        destination = fetch.blocks[fetch.num_here + number]
        cells = replaced(world.nodes[node].cells, destination, row)
        fetch = fetch._replace(num_copied=number + 1)
        world = _with_fetch(world.with_node(node, cells=cells), node, fetch)
        is_last = fetch.num_copied == len(fetch.sources)
        return self._publish(world, node, fetch) if is_last and fetch.is_compared else world

    def _compare(self, world: World, node: int, fetch: Fetch) -> World:
        present = world.nodes[fetch.source].generations
        if any(present[b] != g for b, g in zip(fetch.sources, fetch.expected, strict=True)):
            return self.end(world, node, fetch)
        fetch = fetch._replace(is_compared=True)
        world = _with_fetch(world, node, fetch)
        is_over = fetch.num_copied == len(fetch.sources)
        return self._publish(world, node, fetch) if is_over else world

    def _publish(self, world: World, node: int, fetch: Fetch) -> World:
        for index in range(fetch.num_here, len(fetch.blocks)):
            (block_hash,) = hashes(index + 1)[index:]
            outcome = pools.publish(world.nodes[node].pool, fetch.blocks[index], block_hash)
            world = world.with_pool(node, outcome, self._config)
        return self.end(world, node, fetch)

    def end(self, world: World, node: int, fetch: Fetch, *, is_told: bool = True) -> World:
        """Whatever came of it: a leg computes what is missing."""
        left = tuple(each for each in world.nodes[node].fetches if each != fetch)
        world = self._release(world.with_node(node, fetches=left), node, fetch.blocks)
        hold = Hold(fetch.attempt, fetch.is_prefetch, fetch.sources)
        if fetch.sources and hold in world.nodes[fetch.source].holds:
            world = self._drop(world, fetch.source, hold)
        if fetch.is_prefetch and is_told:
            world = world.tell_coordinator(Message(Kind.PREFETCHED, fetch.attempt, node))
        return world

    def _release(self, world: World, node: int, blocks: tuple[int, ...]) -> World:
        if not blocks:
            return world
        return world.with_pool(node, pools.release(world.nodes[node].pool, blocks), self._config)


def _with_fetch(world: World, node: int, fetch: Fetch) -> World:
    fetches = tuple(fetch if each[:2] == fetch[:2] else each for each in world.nodes[node].fetches)
    return world.with_node(node, fetches=fetches)


def _name(node: int, fetch: Fetch) -> str:
    return f"{'prefetch' if fetch.is_prefetch else 'fetch'} of attempt {fetch.attempt} on {node}"
