"""All that can happen between an exporter and a puller, and what must hold in every world."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from functools import partial

from tests.model.canonical import canonical
from tests.model.exporter_side import ExporterSide
from tests.model.invariants import check
from tests.model.puller_side import PullerSide
from tests.model.tables import Tables
from tests.model.world import Config, Message, Move, World, first_world


class PairRules:
    """Of one configuration, for `Search`."""

    def __init__(self, config: Config) -> None:
        self.name = config.name
        self._config = config
        self._tables = Tables()
        self._exporter = ExporterSide(config, self._tables)
        self._puller = PullerSide(config, self._tables)

    @property
    def rows_used(self) -> set[tuple[Enum, Enum]]:
        """Of the tables of legal moves, so far."""
        return self._tables.used

    def first(self) -> World:
        return first_world(self._config)

    def canonical(self, world: World) -> World:
        return canonical(world, self._config)

    def check(self, world: World) -> None:
        check(world, self._config)

    def moves(self, world: World) -> Iterator[tuple[bool, Move]]:
        for side in (self._exporter, self._puller):
            yield from ((True, move) for move in side.progress(world))
            yield from ((False, move) for move in side.arrivals(world))
            yield from ((False, move) for move in side.hazards(world))
        yield from ((True, move) for move in self._deliveries(world))

    def _deliveries(self, world: World) -> Iterator[Move]:
        """A message that may come twice stays under way as long as it could matter."""
        end = 1 if self._config.in_order else None
        for message in world.to_exporter[:end] if world.exporter.is_up else ():
            left = world
            if not self._config.duplicates:
                left = world._replace(to_exporter=_without(world.to_exporter, message))
            name = f"exporter hears {message.kind.name} of {message.request}"
            yield name, partial(self._exporter.receive, left, message)
        for message in world.to_puller[:end] if world.puller.is_up else ():
            left = world
            if not self._config.duplicates:
                left = world._replace(to_puller=_without(world.to_puller, message))
            name = f"puller hears {message.kind.name} of {message.request}"
            yield name, partial(self._puller.receive, left, message)


def _without(messages: tuple[Message, ...], heard: Message) -> tuple[Message, ...]:
    index = messages.index(heard)
    return messages[:index] + messages[index + 1 :]
