"""KV from the other node, and for it: `pdserve/node/prefixes` in the small.

A query and its answer are one move here, and so are a fetch's end and its settle: a lease may end
at any time, so blocks may be freed before, during and after every copy anyway. Who takes a stream
over has no lease: what is held for it is freed when it is gone, or when another one comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.model import pools
from tests.model.streams.world import (
    BLOCK_TOKENS,
    NUM_PROMPT,
    Config,
    Fetch,
    Hold,
    Kind,
    Leg,
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
                    begin = self._begin if fetch.takes == NOBODY else self._subscribe
                    yield f"{name} begins", partial(begin, world, node, fetch)
            elif is_cut_off:
                yield f"{name} has lost its source", partial(self.end, world, node, fetch)
            elif fetch.takes != NOBODY and _hold_for(world, fetch) is None:
                yield f"{name} has lost its stream", partial(self.end, world, node, fetch)
            elif not _is_here(fetch):
                yield from self._pull(world, node, fetch, name)
            elif not fetch.has_asked:
                yield f"{name} asks for the rest", partial(self._ask, world, node, fetch)
            elif _has_ended_there(world, fetch):
                yield f"{name} hears the rest", partial(self._hear_rest, world, node, fetch)
        if self._mutation is not Mutation.NO_LEASE:
            for hold in here.holds:
                if hold.takes == NOBODY or not _has_taker(world, 1 - node, hold):
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
        for leg in world.nodes[node].legs:
            if leg.attempt == hold.takes:  # it goes on here
                world = world.with_leg(node, leg._replace(is_leaving=False))
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

    # ---- a stream is taken over ----------------------------------------------------------------

    def _subscribe(self, world: World, node: int, fetch: Fetch) -> World:
        """Have the source hold what the stream has completed; there may be no stream any more."""
        legs = world.nodes[fetch.source].legs if fetch.source != NOBODY else ()
        stream = next((leg for leg in legs if leg.attempt == fetch.takes), None)
        begun = fetch._replace(is_begun=True)
        world = _with_fetch(world, node, begun)
        if stream is None or stream.is_cancelled or not stream.num_computed:
            return self.end(world, node, begun)
        sources = stream.table[: stream.num_computed // BLOCK_TOKENS]
        world = self._hold(world, node, begun, sources)
        return self._expect(world, node, begun, sources)

    def _hold(self, world: World, node: int, fetch: Fetch, sources: tuple[int, ...]) -> World:
        held = pools.retain(world.nodes[fetch.source].pool, sources)
        world = world.with_pool(fetch.source, held, self._config)
        hold = Hold(fetch.attempt, False, sources, fetch.takes)
        return world.with_node(fetch.source, holds=(*world.nodes[fetch.source].holds, hold))

    def _expect(self, world: World, node: int, fetch: Fetch, sources: tuple[int, ...]) -> World:
        """Take room for these blocks of the source, which are pulled next."""
        taken = pools.allocate(world.nodes[node].pool, len(sources))
        if taken is None:
            return self.end(world, node, fetch)
        present = world.nodes[fetch.source].generations
        expecting = fetch._replace(
            num_here=len(fetch.blocks),
            blocks=fetch.blocks + taken[1],
            sources=sources,
            expected=tuple(present[block_id] for block_id in sources),
            num_copied=0,
            is_compared=False,
        )
        return _with_fetch(world.with_pool(node, taken[0], self._config), node, expecting)

    def _ask(self, world: World, node: int, fetch: Fetch) -> World:
        """Have the stream end there with its next token."""
        for leg in world.nodes[fetch.source].legs:
            if leg.attempt == fetch.takes:
                world = world.with_leg(fetch.source, leg._replace(is_leaving=True))
                if self._mutation is Mutation.TAKEN_IN_STEP and leg.is_stepping:
                    world = self.hand_off(world, fetch.source, leg, leg.num_output + 1)
        return _with_fetch(world, node, fetch._replace(has_asked=True))

    def hand_off(self, world: World, node: int, leg: Leg, num_output: int) -> World:
        """Hold all of a stream's KV for who takes it over: it ends here."""
        for hold in world.nodes[node].holds:
            if hold.takes == leg.attempt and not hold.num_output:
                rest = leg.table[len(hold.blocks) :]
                held = pools.retain(world.nodes[node].pool, rest)
                whole = hold._replace(blocks=hold.blocks + rest, num_output=num_output)
                holds = tuple(whole if each == hold else each for each in world.nodes[node].holds)
                world = world.with_pool(node, held, self._config).with_node(node, holds=holds)
        return world

    def keep_no_stream(self, world: World, node: int, attempt: int) -> World:
        """Nobody takes this stream over: it has ended here."""
        for hold in world.nodes[node].holds:
            if hold.takes == attempt:
                world = self._drop(world, node, hold)
        return world

    def _hear_rest(self, world: World, node: int, fetch: Fetch) -> World:
        hold = _hold_for(world, fetch)
        assert hold is not None
        told = fetch._replace(num_output=hold.num_output)
        return self._expect(
            _with_fetch(world, node, told), node, told, hold.blocks[len(fetch.blocks) :]
        )

    def _adopt(self, world: World, node: int, fetch: Fetch) -> World:
        """All of it is here, and the source may forget it."""
        computed = NUM_PROMPT + fetch.num_output - 1
        leg = Leg(fetch.attempt, fetch.num_output, fetch.blocks, computed)
        left = tuple(each for each in world.nodes[node].fetches if each != fetch)
        world = world.with_node(node, fetches=left, legs=(*world.nodes[node].legs, leg))
        hold = _hold_for(world, fetch)
        return world if hold is None else self._drop(world, fetch.source, hold)

    # ---- parts ---------------------------------------------------------------------------------

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
        return self._pulled(world, node, fetch) if is_last and fetch.is_compared else world

    def _compare(self, world: World, node: int, fetch: Fetch) -> World:
        present = world.nodes[fetch.source].generations
        if any(present[b] != g for b, g in zip(fetch.sources, fetch.expected, strict=True)):
            return self.end(world, node, fetch)
        fetch = fetch._replace(is_compared=True)
        world = _with_fetch(world, node, fetch)
        is_over = fetch.num_copied == len(fetch.sources)
        return self._pulled(world, node, fetch) if is_over else world

    def _pulled(self, world: World, node: int, fetch: Fetch) -> World:
        if fetch.takes == NOBODY:
            return self._publish(world, node, fetch)
        return self._adopt(world, node, fetch) if fetch.num_output else world

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
        hold: Hold | None = Hold(fetch.attempt, fetch.is_prefetch, fetch.sources)
        if fetch.takes != NOBODY:
            hold = _hold_for(world, fetch)
        if hold is not None and fetch.sources and hold in world.nodes[fetch.source].holds:
            world = self._drop(world, fetch.source, hold)
        if fetch.is_prefetch and is_told:
            world = world.tell_coordinator(Message(Kind.PREFETCHED, fetch.attempt, node))
        if fetch.takes != NOBODY and is_told:
            world = world.tell_coordinator(Message(Kind.FAILED, fetch.attempt, node))
        return world

    def _release(self, world: World, node: int, blocks: tuple[int, ...]) -> World:
        if not blocks:
            return world
        return world.with_pool(node, pools.release(world.nodes[node].pool, blocks), self._config)


def _with_fetch(world: World, node: int, fetch: Fetch) -> World:
    fetches = tuple(fetch if each[:2] == fetch[:2] else each for each in world.nodes[node].fetches)
    return world.with_node(node, fetches=fetches)


def _hold_for(world: World, fetch: Fetch) -> Hold | None:
    """What the source keeps for one that takes a stream over."""
    if fetch.source == NOBODY:
        return None
    holds = world.nodes[fetch.source].holds
    return next((h for h in holds if h[:2] == fetch[:2] and h.takes == fetch.takes), None)


def _has_taker(world: World, node: int, hold: Hold) -> bool:
    return any(f[:2] == hold[:2] and f.takes == hold.takes for f in world.nodes[node].fetches)


def _is_here(fetch: Fetch) -> bool:
    """Whether all that is expected of a stream that is taken over has been pulled."""
    is_whole = fetch.is_compared and fetch.num_copied == len(fetch.sources)
    return fetch.takes != NOBODY and is_whole


def _has_ended_there(world: World, fetch: Fetch) -> bool:
    hold = _hold_for(world, fetch)
    return hold is not None and hold.num_output > 0 and not fetch.num_output


def _name(node: int, fetch: Fetch) -> str:
    what = "prefetch" if fetch.is_prefetch else "fetch"
    return f"{what if fetch.takes == NOBODY else 'take'} of attempt {fetch.attempt} on {node}"
