"""How many lines run at the same time: as many as the cluster takes up at once, and no more.

A line has a place from its start until its first token. Admission lets it begin as far as nobody
else is harmed, so lines that have not begun show that there is no room for more. Behind that a line
counts only against what this coordinator can have in flight. Tenants have equal shares of both.
"""

from __future__ import annotations

import asyncio
from collections import Counter

PER_NODE = 8  # lines that have not begun, for each node: enough to fill a step of prompts
_FLIGHT_SHARE = 2  # at most one in so many of the calls in flight is a line


class LinePlaces:
    """The places of one coordinator's lines."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._beginning: Counter[str] = Counter()  # by tenant
        self._running: Counter[str] = Counter()  # of these and those that have begun
        self._owners: frozenset[str] = frozenset()
        self._most_beginning = 0
        self._most_running = 1

    @property
    def num_running(self) -> int:
        """The number of lines that run."""
        return self._running.total()

    def resize(self, num_nodes: int, max_inflight: int, owners: frozenset[str]) -> None:
        """Follow the cluster, and the tenants that have batches now. Lines wake no cluster."""
        self._most_beginning = PER_NODE * num_nodes
        self._most_running = max(1, max_inflight // _FLIGHT_SHARE)
        self._owners = owners
        self._changed.set()

    async def take(self, owner: str) -> LinePlace:
        """Wait for a place of a tenant's."""
        while not self._has_place(owner):
            self._changed.clear()
            await self._changed.wait()
        self._beginning[owner] += 1
        self._running[owner] += 1
        return LinePlace(self, owner)

    def begun(self, owner: str) -> None:
        """Note that a line has begun."""
        self._beginning[owner] -= 1
        self._changed.set()

    def ended(self, owner: str) -> None:
        """Note that a line has ended."""
        self._running[owner] -= 1
        self._changed.set()

    def _has_place(self, owner: str) -> bool:
        shares = max(1, len(self._owners | {owner}))
        return (
            self._beginning.total() < self._most_beginning
            and self._beginning[owner] < -(-self._most_beginning // shares)
            and self._running.total() < self._most_running
            and self._running[owner] < -(-self._most_running // shares)
        )


class LinePlace:
    """The place of one line."""

    def __init__(self, places: LinePlaces, owner: str) -> None:
        self._places = places
        self._owner = owner
        self._has_begun = False
        self._has_left = False

    def begun(self) -> None:
        """Note that its line has begun; again does nothing."""
        if not self._has_begun:
            self._has_begun = True
            self._places.begun(self._owner)

    def leave(self) -> None:
        """Give it back; again does nothing."""
        self.begun()
        if not self._has_left:
            self._has_left = True
            self._places.ended(self._owner)
