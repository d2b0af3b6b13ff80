"""All that can happen to the stream, and what must hold in every world."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.streams.canonical import canonical
from tests.model.streams.coordinator_side import CoordinatorSide
from tests.model.streams.node_side import NodeSide
from tests.model.streams.world import (
    BLOCK_TOKENS,
    NODES,
    Config,
    Kind,
    Move,
    Status,
    World,
    contents,
    first_world,
)
from tests.model.world import Violation


class StreamRules:
    """Of one configuration, for `Search`."""

    def __init__(self, config: Config) -> None:
        self.name = config.name
        self._config = config
        self._sides = (CoordinatorSide(config), NodeSide(config))

    def first(self) -> World:
        return first_world(self._config)

    def canonical(self, world: World) -> World:
        return canonical(world, self._config)

    def moves(self, world: World) -> Iterator[tuple[bool, Move]]:
        for side in self._sides:
            yield from ((True, move) for move in side.progress(world))
            yield from ((False, move) for move in side.hazards(world))

    def check(self, world: World) -> None:
        """Every block holds what is relied on, and nobody else emits beside the stream's owner.

        Raises:
            Violation: names node and block, or attempt.
        """
        for node in NODES:
            _check_blocks(world, node)
            _check_owner(world, node)


def _check_blocks(world: World, node: int) -> None:
    here = world.nodes[node]
    for leg in here.legs:
        if any(not here.pool.references[block_id] for block_id in leg.table):
            raise Violation(f"a step on {node} writes to a free block")
        if leg.is_cancelled:
            continue
        for position in range(leg.num_computed):
            index, place = divmod(position, BLOCK_TOKENS)
            if here.cells[leg.table[index]][place] != position + 1:
                raise Violation(f"a stream on {node} reads wrong KV at {position}")
    for block_id, (index,) in here.pool.hash_of:
        if here.cells[block_id] != contents(index - 1):
            raise Violation(f"the prefix cache of {node} holds a wrong block")


def _check_owner(world: World, node: int) -> None:
    """Whoever else has the stream is about to hear that it is not his any more."""
    coordinator, here = world.coordinator, world.nodes[node]
    told = {m.attempt for m in world.to_nodes[node] if m.kind is Kind.CANCEL}
    for leg in here.legs:
        is_owner = coordinator.owner == node and leg.attempt == coordinator.attempt
        successor = coordinator.successor
        is_next = successor is not None and successor[1:] == (node, leg.attempt)
        if (is_owner or is_next) and coordinator.status is Status.LIVE:
            continue
        if not (leg.is_cancelled or here.is_cut or leg.attempt in told):
            raise Violation(f"node {node} goes on with attempt {leg.attempt}, which is not wanted")
