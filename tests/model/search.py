"""Every world that can come of the first one, breadth first; and whether each can come to rest.

Worlds are kept as numbers of their parts, since a hundred thousand of them share a few thousand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from tests.model.canonical import canonical
from tests.model.exporter_side import ExporterSide
from tests.model.invariants import check
from tests.model.puller_side import PullerSide
from tests.model.tables import Tables
from tests.model.world import Config, Message, Move, Violation, World, first_world

_Key = tuple[int, ...]


@dataclass
class Found:
    """What a search without a violation has seen."""

    num_worlds: int
    num_moves: int
    rows_used: set[tuple[Enum, Enum]]


@dataclass
class _Graph:
    keys: list[_Key] = field(default_factory=list)
    parents: list[tuple[int, str]] = field(default_factory=list)
    numbers: dict[_Key, int] = field(default_factory=dict)
    calmer: list[list[int]] = field(default_factory=list)  # world |-> whence progress leads to it
    is_free: list[bool] = field(default_factory=list)


class Search:
    """Searches one configuration."""

    def __init__(self, config: Config, max_worlds: int = 1_000_000) -> None:
        self._config = config
        self._tables = Tables()
        self._exporter = ExporterSide(config, self._tables)
        self._puller = PullerSide(config, self._tables)
        self._max_worlds = max_worlds
        self._graph = _Graph()
        self._parts: list[object] = []
        self._part_numbers: dict[object, int] = {}

    def run(self) -> Found:
        """Look at every world.

        Raises:
            Violation: with the shortest way to it.
        """
        graph = self._graph
        self._enter(first_world(self._config), -1, "")
        queue = deque([0])
        num_moves = 0
        while queue:
            number = queue.popleft()
            for is_progress, (name, move) in self._moves(self._world(number)):
                try:
                    after = move()
                    if after is None:
                        continue
                    num_moves += 1
                    known = len(graph.keys)
                    reached = self._enter(after, number, name)
                    if reached == known:
                        check(self._world(reached), self._config)
                        queue.append(reached)
                except AssertionError as error:
                    raise Violation(self._tell(number, name, str(error))) from error
                assert known < self._max_worlds, f"more than {self._max_worlds} worlds"
                if is_progress:
                    graph.calmer[reached].append(number)
        self._check_all_come_to_rest()
        return Found(len(graph.keys), num_moves, self._tables.used)

    def _moves(self, world: World) -> Iterator[tuple[bool, Move]]:
        """What can happen, and whether it must happen some time."""
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

    # ---- the graph -----------------------------------------------------------------------------

    def _enter(self, world: World, parent: int, name: str) -> int:
        """The world's number; a new one if there is none like it yet."""
        graph = self._graph
        as_it_is = tuple(map(self._number, world))
        number = graph.numbers.get(as_it_is)
        if number is not None:
            return number
        world = canonical(world, self._config)
        key = tuple(map(self._number, world))
        number = graph.numbers.get(key)
        if number is None:
            number = graph.numbers[key] = len(graph.keys)
            graph.keys.append(key)
            graph.parents.append((parent, name))
            graph.calmer.append([])
            graph.is_free.append(world.is_free)
        graph.numbers[as_it_is] = number
        return number

    def _number(self, part: object) -> int:
        number = self._part_numbers.setdefault(part, len(self._parts))
        if number == len(self._parts):
            self._parts.append(part)
        return number

    def _world(self, number: int) -> World:
        return World(*(self._parts[part] for part in self._graph.keys[number]))  # type: ignore[arg-type]

    def _check_all_come_to_rest(self) -> None:
        """From every world, what must happen some time can lead to one where all is free."""
        graph = self._graph
        resting = [number for number, is_free in enumerate(graph.is_free) if is_free]
        can_rest = set(resting)
        while resting:
            for before in graph.calmer[resting.pop()]:
                if before not in can_rest:
                    can_rest.add(before)
                    resting.append(before)
        for number in range(len(graph.keys)):
            if number not in can_rest:
                raise Violation(self._tell(number, "and from here on", "blocks never come back"))

    def _tell(self, number: int, name: str, what: str) -> str:
        """The shortest way to a world, and what happens next."""
        way = [f"{name}: {what}"]
        while number > 0:
            number, name = self._graph.parents[number]
            way.insert(0, name)
        steps = "".join(f"\n  {n}. {name}" for n, name in enumerate(way, 1))
        return f"in the world {self._config.name!r}{steps}"


def _without(messages: tuple[Message, ...], heard: Message) -> tuple[Message, ...]:
    index = messages.index(heard)
    return messages[:index] + messages[index + 1 :]
