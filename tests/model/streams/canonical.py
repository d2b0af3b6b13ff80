"""One world for all those that differ only in the names of blocks, or in what nobody will read."""

from __future__ import annotations

from collections.abc import Sequence

from tests.model.streams.world import (
    BLOCK_TOKENS,
    NODES,
    NUM_BLOCKS,
    Config,
    Fetch,
    Kind,
    Message,
    Mutation,
    Node,
    Status,
    World,
)
from tests.model.world import SCRAP

_UNFENCED = (Mutation.SAME_ATTEMPT, Mutation.ANY_ATTEMPT, Mutation.BACK_TO_SOURCE)
_NAMES = tuple(range(NUM_BLOCKS))
_PRESENT = (0,) * NUM_BLOCKS


def canonical(world: World, config: Config) -> World:
    """The world with every block named after its place, and without what cannot matter any more."""
    letters = world.to_coordinator
    if letters:
        if config.mutation not in _UNFENCED:
            letters = tuple(m for m in letters if not _is_dead(world, m))
        if not config.in_order:
            letters = tuple(sorted(letters))
        world = world._replace(to_coordinator=letters)
    names = [_names_of(node) for node in world.nodes]
    former = [node.generations for node in world.nodes]
    if any(name != _NAMES for name in names) or any(g != _PRESENT for g in former):
        world = _renamed(world, names, former)
    return _without_free_contents(world)


def _is_dead(world: World, message: Message) -> bool:
    coordinator = world.coordinator
    if coordinator.status is not Status.LIVE or message.attempt < coordinator.attempt:
        return True
    if message.kind is Kind.PREFETCHED:
        return coordinator.move is None and message.attempt == coordinator.attempt
    return message.kind is Kind.TOKEN and message.number < coordinator.shown


def _names_of(node: Node) -> tuple[int, ...]:
    """block id |-> its canonical name: the blocks are numbered as they first appear."""
    names: dict[int, int] = {}
    places = [leg.table for leg in node.legs]
    places += [fetch.blocks for fetch in node.fetches]
    places += [hold.blocks for hold in node.holds]
    for blocks in (*places, node.pool.uncached, node.pool.cached):
        for block_id in blocks:
            names.setdefault(block_id, len(names))
    assert len(names) == NUM_BLOCKS, "a block is nowhere"
    return tuple(names[block_id] for block_id in _NAMES)


def _renamed(
    world: World, names: Sequence[tuple[int, ...]], former: Sequence[tuple[int, ...]]
) -> World:
    nodes = []
    for node in NODES:
        here, mine, there = world.nodes[node], names[node], 1 - node
        cells = [here.cells[0]] * NUM_BLOCKS
        for block_id, row in enumerate(here.cells):
            cells[mine[block_id]] = row
        nodes.append(
            here._replace(
                pool=here.pool.renamed(mine),
                cells=tuple(cells),
                generations=_PRESENT,
                legs=tuple(leg._replace(table=_map(leg.table, mine)) for leg in here.legs),
                holds=tuple(hold._replace(blocks=_map(hold.blocks, mine)) for hold in here.holds),
                fetches=tuple(
                    _renamed_fetch(fetch, mine, names[there], former[there])
                    for fetch in here.fetches
                ),
            )
        )
    return world._replace(nodes=tuple(nodes))


def _renamed_fetch(
    fetch: Fetch, mine: tuple[int, ...], theirs: tuple[int, ...], former: tuple[int, ...]
) -> Fetch:
    return fetch._replace(
        blocks=_map(fetch.blocks, mine),
        sources=_map(fetch.sources, theirs),
        expected=_relative(fetch.sources, fetch.expected, former),
    )


def _map(blocks: Sequence[int], names: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(names[block_id] for block_id in blocks)


def _relative(
    blocks: Sequence[int], generations: Sequence[int], former: tuple[int, ...]
) -> tuple[int, ...]:
    return tuple(0 if former[b] == g else -1 for b, g in zip(blocks, generations, strict=True))


def _without_free_contents(world: World) -> World:
    """What is in a free block that no ticket names, nobody will read."""
    for node in NODES:
        here = world.nodes[node]
        scrap = (SCRAP,) * BLOCK_TOKENS
        free = [b for b in here.pool.uncached if here.cells[b] != scrap]
        if not free:
            continue
        named = {b for fetch in world.nodes[1 - node].fetches for b in fetch.sources}
        cells = tuple(
            scrap if b in free and b not in named else row for b, row in enumerate(here.cells)
        )
        world = world.with_node(node, cells=cells)
    return world
