"""The exporter's blocks and what is in them; where a mutation concerns those, it is here."""

from __future__ import annotations

from collections.abc import Sequence

from tests.model import pools
from tests.model.world import SCRAP, Config, Mutation, World, replaced


class ExporterMemory:
    """Every method gives a new world."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._mutation = config.mutation

    def release(self, world: World, blocks: tuple[int, ...]) -> World:
        if not blocks:
            return world
        return self.took_back(world, pools.release(world.exporter.pool, blocks))

    def took_back(self, world: World, outcome: pools.Outcome) -> World:
        world = world.with_exporter(pool=outcome.state)
        if self._mutation is Mutation.NO_BUMP:
            return world
        if self._mutation is Mutation.BUMP_AFTER_REUSE:
            owed = tuple(sorted({*world.exporter.owed_bumps, *outcome.bumped}))
            return world.with_exporter(owed_bumps=owed)
        return self._bump(world, outcome.bumped)

    def pay_bumps(self, world: World) -> World:
        world = self._bump(world, world.exporter.owed_bumps)
        return world.with_exporter(owed_bumps=())

    def _bump(self, world: World, blocks: Sequence[int]) -> World:
        generations = list(world.memories[-1].generations)
        for block_id in blocks:
            generations[block_id] += 1
            if self._mutation is Mutation.ONE_BIT_GENERATIONS:
                generations[block_id] %= 2
        return world.with_memory(world.memories[-1]._replace(generations=tuple(generations)))

    def scribble(self, world: World, blocks: Sequence[int]) -> World:
        """From now on the engine may write anything to these blocks."""
        for block_id in blocks:
            world = self.write(world, block_id, 0, self._config.num_layers, SCRAP)
        return world

    def write(self, world: World, block_id: int, first: int, end: int, datum: int) -> World:
        memory = world.memories[-1]
        row = memory.cells[block_id]
        row = (*row[:first], *(datum,) * (end - first), *row[end:])
        cells = replaced(memory.cells, block_id, row)
        return world.with_memory(memory._replace(cells=cells))
