"""Every world that can come of the first one, breadth first; and whether each can come to rest.

Worlds are kept as numbers of their parts, since a hundred thousand of them share a few thousand.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from tests.model.world import Violation

_Key = tuple[int, ...]


class AnyWorld(Protocol):
    """A named tuple of parts."""

    @classmethod
    def _make(cls, iterable: Any, /) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...

    @property
    def is_free(self) -> bool:
        """Whether nobody holds a block, and nobody is about to."""
        ...


WorldT = TypeVar("WorldT", bound=AnyWorld)

# What happens, and how to get the world after it; None: it cannot happen now.
AnyMove: TypeAlias = tuple[str, Callable[[], WorldT | None]]


class Rules(Protocol[WorldT]):
    """What is searched."""

    name: str

    def first(self) -> WorldT:
        """The world that all others come of."""
        ...

    def moves(self, world: WorldT) -> Iterator[tuple[bool, AnyMove[WorldT]]]:
        """What can happen, and whether it must happen some time."""
        ...

    def canonical(self, world: WorldT) -> WorldT:
        """One world for all that do not differ in what can happen."""
        ...

    def check(self, world: WorldT) -> None:
        """Raises Violation."""
        ...


@dataclass
class Found:
    """What a search without a violation has seen."""

    num_worlds: int
    num_moves: int


@dataclass
class _Graph:
    keys: list[_Key] = field(default_factory=list)
    parents: list[tuple[int, str]] = field(default_factory=list)
    numbers: dict[_Key, int] = field(default_factory=dict)
    calmer: list[list[int]] = field(default_factory=list)  # world |-> whence progress leads to it
    is_free: list[bool] = field(default_factory=list)


class Search(Generic[WorldT]):
    """Searches the worlds of these rules."""

    def __init__(self, rules: Rules[WorldT], max_worlds: int = 1_000_000) -> None:
        self._rules = rules
        self._first = rules.first()
        self._max_worlds = max_worlds
        self._graph = _Graph()
        self._parts: list[object] = []
        self._part_numbers: dict[object, int] = {}

    def run(self) -> Found:
        """Look at every world.

        Raises:
            Violation: with the shortest way to it.
        """
        gc.disable()  # nothing goes before the end; all would be looked at again and again
        try:
            return self._run()
        finally:
            gc.enable()

    def _run(self) -> Found:
        graph = self._graph
        self._enter(self._first, -1, "")
        queue = deque([0])
        num_moves = 0
        while queue:
            number = queue.popleft()
            for is_progress, (name, move) in self._rules.moves(self._world(number)):
                try:
                    after = move()
                    if after is None:
                        continue
                    num_moves += 1
                    known = len(graph.keys)
                    reached = self._enter(after, number, name)
                    if reached == known:
                        self._rules.check(self._world(reached))
                        queue.append(reached)
                except AssertionError as error:
                    raise Violation(self._tell(number, name, str(error))) from error
                assert known < self._max_worlds, f"more than {self._max_worlds} worlds"
                if is_progress:
                    graph.calmer[reached].append(number)
        self._check_all_come_to_rest()
        return Found(len(graph.keys), num_moves)

    # ---- the graph -----------------------------------------------------------------------------

    def _enter(self, world: WorldT, parent: int, name: str) -> int:
        """The world's number; a new one if there is none like it yet."""
        graph = self._graph
        as_it_is = tuple(map(self._number, world))
        number = graph.numbers.get(as_it_is)
        if number is not None:
            return number
        world = self._rules.canonical(world)
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

    def _world(self, number: int) -> WorldT:
        parts = (self._parts[part] for part in self._graph.keys[number])
        world: WorldT = self._first._make(parts)
        return world

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
        return f"in the world {self._rules.name!r}{steps}"
