"""One world for all those that differ only in names: of blocks, of generations, of dead memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.model.world import (
    NUM_BLOCKS,
    REQUESTS,
    SCRAP,
    Cells,
    Config,
    Intake,
    Memory,
    Message,
    Mutation,
    Phase,
    Ticket,
    World,
    blank_memory,
    replaced,
)

_AS_THEY_ARE = list(range(NUM_BLOCKS))
_PRESENT = (0,) * NUM_BLOCKS
_OVER = (Phase.OVER, Phase.FAILED)


def canonical(world: World, config: Config) -> World:
    """The world with every block named after its place, and without what cannot matter any more."""
    world = _without_dead_letters(world, config)
    world = _without_dead_memory(world, config)
    exporter, puller = world.exporter, world.puller
    sources = _names(
        [
            *(leg.table for leg in exporter.legs),
            *(handoff.blocks for handoff in exporter.handoffs if handoff is not None),
            exporter.pool.uncached,
            exporter.pool.cached,
        ]
    )
    destinations = _names(
        [
            *(intake.table for intake in puller.intakes),
            puller.pool.uncached,
            puller.pool.cached,
        ]
    )
    is_moved = any(memory.generations != _PRESENT for memory in world.memories)
    if is_moved or sources != _AS_THEY_ARE or destinations != _AS_THEY_ARE:
        world = _Renaming(world, config, sources, destinations).world()
    world = _without_free_contents(world)
    if len(world.to_exporter) > 1 and not config.in_order:
        world = world._replace(to_exporter=tuple(sorted(world.to_exporter)))
    if len(world.to_puller) > 1 and not config.in_order:
        world = world._replace(to_puller=tuple(sorted(world.to_puller)))
    return world


def _without_dead_letters(world: World, config: Config) -> World:
    """Messages about requests that are over where they go to would be dropped there."""
    if config.mutation is Mutation.IDS_AGAIN:
        return world
    legs, intakes = world.exporter.legs, world.puller.intakes
    for request in REQUESTS:
        if intakes[request].phase is not Phase.RUNNING:
            if any(message.request == request for message in world.to_puller):
                left = tuple(m for m in world.to_puller if m.request != request)
                world = world._replace(to_puller=left)
            if legs[request].phase in _OVER and any(
                message.request == request for message in world.to_exporter
            ):
                left = tuple(m for m in world.to_exporter if m.request != request)
                world = world._replace(to_exporter=left)
    return world


def _without_dead_memory(world: World, config: Config) -> World:
    """A former life's memory is kept while somebody may read it."""
    if len(world.memories) == 1:
        return world
    read = {world.exporter.life}
    for intake in world.puller.intakes:
        if intake.pull is not None:
            read.add(intake.pull.life)
        if intake.phase is Phase.RUNNING:
            read.add(intake.source_life)
    return world._replace(
        memories=tuple(
            memory if life in read else blank_memory(config)
            for life, memory in enumerate(world.memories)
        )
    )


def _without_free_contents(world: World) -> World:
    """What is in a free block that nobody can name, nobody will read."""
    puller = world.puller
    cells = _blanked(puller.cells, puller.pool.uncached)
    if cells is not puller.cells:
        world = world._replace(puller=puller._replace(cells=cells))
    memory = world.memories[-1]
    unnamed = [b for b in world.exporter.pool.uncached if any(memory.cells[b])]
    if unnamed:
        named = set(world.named_blocks())
        cells = _blanked(memory.cells, [b for b in unnamed if b not in named])
        world = world._replace(memories=(*world.memories[:-1], memory._replace(cells=cells)))
    return world


def _blanked(cells: Cells, block_ids: Iterable[int]) -> Cells:
    for block_id in block_ids:
        if any(cells[block_id]):
            cells = replaced(cells, block_id, (SCRAP,) * len(cells[block_id]))
    return cells


class _Renaming:
    def __init__(
        self, world: World, config: Config, sources: Sequence[int], destinations: Sequence[int]
    ) -> None:
        self._world = world
        self._config = config
        self._sources = sources
        self._destinations = destinations
        self._life = world.exporter.life if world.exporter.is_up else world.exporter.life + 1
        self._tickets: dict[Ticket, Ticket] = {}

    def world(self) -> World:
        world, sources, destinations = self._world, self._sources, self._destinations
        exporter = world.exporter._replace(
            pool=world.exporter.pool.renamed(sources),
            legs=tuple(leg._replace(table=_map(leg.table, sources)) for leg in world.exporter.legs),
            handoffs=tuple(
                handoff
                and handoff._replace(
                    blocks=_map(handoff.blocks, sources), said=self._all(handoff.said)
                )
                for handoff in world.exporter.handoffs
            ),
            owed_bumps=tuple(sorted(_map(world.exporter.owed_bumps, sources))),
        )
        puller = world.puller._replace(
            pool=world.puller.pool.renamed(destinations),
            cells=_moved(world.puller.cells, destinations),
            intakes=tuple(self._intake(intake) for intake in world.puller.intakes),
        )
        return World(
            exporter,
            puller,
            tuple(self._memory(life) for life in range(len(world.memories))),
            self._letters(world.to_exporter),
            self._letters(world.to_puller),
        )

    def _intake(self, intake: Intake) -> Intake:
        pull = intake.pull
        if pull is not None:
            is_present = pull.life == self._life
            pull = pull._replace(
                ticket=self._ticket(pull.ticket),
                sources=_map(pull.sources, self._sources) if is_present else pull.sources,
                expected=self._relative(pull.life, pull.sources, pull.expected),
                destinations=_map(pull.destinations, self._destinations),
            )
        return intake._replace(
            table=_map(intake.table, self._destinations), heard=self._all(intake.heard), pull=pull
        )

    def _memory(self, life: int) -> Memory:
        cells = self._world.memories[life].cells
        return Memory(_moved(cells, self._sources) if life == self._life else cells, _PRESENT)

    def _letters(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        return tuple(m._replace(ticket=self._ticket(m.ticket)) for m in messages)

    def _all(self, tickets: Iterable[Ticket]) -> tuple[Ticket, ...]:
        return tuple(self._ticket(ticket) for ticket in tickets)

    def _ticket(self, ticket: Ticket) -> Ticket:
        if not ticket.block_ids:
            return ticket
        known = self._tickets.get(ticket)
        if known is None:
            ids = ticket.block_ids
            known = self._tickets[ticket] = ticket._replace(
                block_ids=_map(ids, self._sources) if ticket.life == self._life else ids,
                generations=self._relative(ticket.life, ids, ticket.generations),
            )
        return known

    def _relative(
        self, life: int, block_ids: Sequence[int], generations: Sequence[int]
    ) -> tuple[int, ...]:
        present = self._world.memories[life].generations
        if self._config.mutation is Mutation.ONE_BIT_GENERATIONS:
            return tuple((g - present[b]) % 2 for b, g in zip(block_ids, generations, strict=True))
        return tuple(
            0 if g == present[b] else -1 for b, g in zip(block_ids, generations, strict=True)
        )


def _names(places: Iterable[Sequence[int]]) -> list[int]:
    """block id |-> its canonical name: the blocks are numbered as they first appear."""
    names = [-1] * NUM_BLOCKS
    num_named = 0
    for blocks in places:
        for block_id in blocks:
            if names[block_id] < 0:
                names[block_id] = num_named
                num_named += 1
    assert num_named == NUM_BLOCKS, "a block is nowhere"
    return names


def _map(block_ids: Sequence[int], names: Sequence[int]) -> tuple[int, ...]:
    return tuple(names[block_id] for block_id in block_ids)


def _moved(cells: tuple[tuple[int, ...], ...], names: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Each row at its block's new name."""
    rows = list(cells)
    for block_id, row in enumerate(cells):
        rows[names[block_id]] = row
    return tuple(rows)
