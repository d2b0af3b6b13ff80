"""Tells coordinators which prefix blocks this node can serve: a snapshot, then every change.

    pool, tier ──stored, evicted──► feed ──once a turn of the event loop──► attached coordinators

A coordinator that attaches is sent all blocks first. Its stream keeps the order, so it misses no
later change. Hearing of a change twice is harmless, since both ends maintain sets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from pdserve.protocol import KvEvents, KvTier
from pdserve.wire.outbox import Sender

MAX_HASHES = 4096  # in one message


class KvMember(Sender, Protocol):
    """A coordinator that may be attached (`CoordinatorLink`)."""

    @property
    def is_attached(self) -> bool:
        """Whether the stream is open."""
        ...


class TierEvents:
    """The changes in one tier since they were last sent."""

    def __init__(
        self, tier: KvTier, held: Callable[[], Iterable[bytes]], on_change: Callable[[], None]
    ) -> None:
        self._tier = tier
        self._held = held
        self._on_change = on_change
        self._is_held: dict[bytes, bool] = {}  # changed hash |-> whether it is held now

    def stored(self, block_hash: bytes) -> None:
        """As CacheObserver.stored."""
        self._note(block_hash, is_held=True)

    def evicted(self, block_hash: bytes) -> None:
        """As CacheObserver.evicted."""
        self._note(block_hash, is_held=False)

    def freed(self, block_hash: bytes) -> None:
        """As CacheObserver.freed. The block can still be served."""

    def take_changes(self) -> list[KvEvents]:
        """Messages for the changes so far, which are then cleared."""
        changes, self._is_held = self._is_held, {}
        return [
            KvEvents(
                tier=self._tier,
                stored=[block_hash for block_hash in part if changes[block_hash]],
                evicted=[block_hash for block_hash in part if not changes[block_hash]],
            )
            for part in _parts(changes)
        ]

    def snapshot(self) -> Iterator[KvEvents]:
        """Messages for all blocks that are held now."""
        for part in _parts(self._held()):
            yield KvEvents(tier=self._tier, stored=part)

    def _note(self, block_hash: bytes, *, is_held: bool) -> None:
        if not self._is_held:
            self._on_change()
        self._is_held[block_hash] = is_held


class KvEventFeed:
    """Sends the changes of a node's tiers to its coordinators. Belongs to the event loop."""

    def __init__(self, links: Sequence[KvMember]) -> None:
        self._links = links
        self._tiers: list[TierEvents] = []
        self._is_scheduled = False  # sending the changes, in the next turn of the event loop

    def follow(self, tier: KvTier, held: Callable[[], Iterable[bytes]]) -> TierEvents:
        """An observer to register with a tier; `held` returns all hashes of the tier."""
        events = TierEvents(tier, held, self._schedule)
        self._tiers.append(events)
        return events

    def attached(self, link: Sender) -> None:
        """Send everything to a coordinator that has just attached."""
        for tier in self._tiers:
            for message in tier.snapshot():
                link.send(message)

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._send_changes)

    def _send_changes(self) -> None:
        self._is_scheduled = False
        listeners = [link for link in self._links if link.is_attached]
        for tier in self._tiers:
            for message in tier.take_changes():
                for link in listeners:
                    link.send(message)


def _parts(hashes: Iterable[bytes]) -> Iterator[list[bytes]]:
    left = list(hashes)
    for first in range(0, len(left), MAX_HASHES):
        yield left[first : first + MAX_HASHES]
