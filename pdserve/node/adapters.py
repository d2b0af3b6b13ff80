"""The adapters that a node has, for whom, and when they leave.

    LoadAdapter ──► read, one at a time ──► loaded: coordinators are told, and legs may name it
                                               │                                  ▲
        no coordinator wants it any more ──────┤ once no leg has it               │ at once, unread
        another needs its place ───────────────┘ that whose last leg began        │
              │                                  the longest ago                  │
              └──► kept in memory, ready for steps, while there is room ──────────┘

A leg whose adapter is not loaded is refused (`use`): nothing else is computed in its place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final, Protocol

from pdserve.node.legs import Legs
from pdserve.protocol import AdapterLoaded, AdapterReport, LoadAdapter
from pdserve.shared.errors import (
    AdapterNotLoaded,
    AdapterRefused,
    AdaptersFull,
    NoNodeAvailable,
    PdserveError,
)
from pdserve.wire.outbox import Sender

log = logging.getLogger(__name__)

MOST_KEPT: Final = 1024  # adapters in memory without a place


class LoadedFiles(Protocol):
    """An adapter that was read."""

    @property
    def digest(self) -> str:
        """Of its tensors and its config, 32 hex digits."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        ...

    @property
    def invocation(self) -> tuple[int, ...]:
        """Tokens of a prompt from which on it computes; (): it computes all."""
        ...


class AdapterStore(Protocol):
    """The adapters that a node's model computes with (`pdserve/engine/adapters/store.py`)."""

    def load(self, path: Path) -> LoadedFiles:
        """Read the adapter in a folder, all or nothing. Blocks; called in any thread.

        Raises:
            ItemNotFound: there is no such folder.
            AdapterRefused: it cannot be used; says why.
            CapacityError: there is no room for it.
        """
        ...

    def unload(self, digest: str) -> None:
        """Give its memory back; no step that is under way has it."""
        ...


@dataclass(slots=True)
class _Loaded:
    num_bytes: int
    invocation: tuple[int, ...]
    wanted_by: set[Sender] = field(default_factory=set)


class NodeAdapters:
    """What coordinators have asked one node to load. Belongs to the event loop."""

    def __init__(
        self, legs: Legs, most: int, most_bytes: int, steps_done: Callable[[], Awaitable[object]]
    ) -> None:
        """
        Args:
            legs: the node's.
            most: how many may be loaded at a time.
            most_bytes: of all of them together.
            steps_done: waits for the steps that are under way.
        """
        self.on_change: Callable[[], None] = lambda: None  # when coordinators should be `told`
        self._legs = legs
        self._most = most
        self._most_bytes = most_bytes
        self._steps_done = steps_done
        self._store: AdapterStore | None = None  # None: the model is still loading
        # By digest; first the one whose last leg began the longest ago.
        self._loaded: dict[str, _Loaded] = {}
        self._kept: dict[str, _Loaded] = {}  # those that lost their places, the first to first
        self._leaving: set[str] = set()  # of these: nobody wants it, but legs have it
        self._turn = asyncio.Lock()  # one is read, or leaves, at a time
        self._tasks: set[asyncio.Task[None]] = set()
        legs.on_closed = self._leg_closed

    def __len__(self) -> int:
        return len(self._loaded)

    def begin(self, store: AdapterStore) -> None:
        """Take orders from now on: the model is there."""
        self._store = store

    def use(self, digest: str) -> None:
        """Note that a leg begins with this adapter. Raises AdapterNotLoaded: it cannot."""
        loaded = self._loaded.pop(digest, None)
        if loaded is None:
            raise AdapterNotLoaded("a node has not loaded the adapter: try again shortly")
        self._loaded[digest] = loaded  # as the last one

    # ---- orders --------------------------------------------------------------------------------

    def load(self, order: LoadAdapter, link: Sender) -> None:
        """Load an adapter for a coordinator, and tell it what came of it."""
        self._spawn(self._load(order, link))

    def unload(self, digest: str, link: Sender) -> None:
        """Keep an adapter no longer for a coordinator; for nobody, once no leg has it."""
        loaded = self._loaded.get(digest)
        if loaded is None:
            if digest in self._kept:
                self._spawn(self._forget(digest))
            return
        loaded.wanted_by.discard(link)
        if not loaded.wanted_by:
            self._leaving.add(digest)
            self._leg_closed(digest)

    def told(self) -> AdapterReport:
        """What coordinators are told: what there is now."""
        return AdapterReport(digests=sorted(self._loaded), most=self._most)

    def coordinator_lost(self, link: Sender) -> None:
        """Its adapters stay until their places are needed: it may come back."""
        for loaded in chain(self._loaded.values(), self._kept.values()):
            loaded.wanted_by.discard(link)

    async def close(self) -> None:
        """Load no more."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- parts ---------------------------------------------------------------------------------

    async def _load(self, order: LoadAdapter, link: Sender) -> None:
        try:
            async with self._turn:
                digest = await self._loaded_from(order)
                loaded = self._loaded[digest]
                loaded.wanted_by.add(link)
                self._leaving.discard(digest)
        except PdserveError as error:
            log.warning("the adapter in %s is not loaded: %s", order.path, error)
            answer = AdapterLoaded(order_id=order.order_id, code=error.code, message=error.message)
        except Exception as error:
            log.exception("loading the adapter in %s failed", order.path)
            message = f"loading {order.path} failed: {type(error).__name__}: {error}"
            answer = AdapterLoaded(
                order_id=order.order_id, code=AdapterRefused.code, message=message
            )
        else:
            answer = AdapterLoaded(
                order_id=order.order_id,
                digest=digest,
                num_bytes=loaded.num_bytes,
                invocation=list(loaded.invocation),
            )
        link.send(answer)

    async def _loaded_from(self, order: LoadAdapter) -> str:
        """Return the digest of an adapter that is loaded from now on. Raises PdserveError."""
        store = self._store
        if store is None:
            raise NoNodeAvailable("a node is still loading its model: try again shortly")
        if order.digest in self._loaded:
            return order.digest
        if order.digest in self._kept:
            self._make_place()
            return self._take(order.digest, self._kept.pop(order.digest))
        files = await asyncio.to_thread(store.load, Path(order.path))
        if files.digest in self._loaded:
            return _expected(files.digest, order)
        log.info("adapter %s is read from %s", files.digest, order.path)
        if files.digest in self._kept:
            _expected(files.digest, order)
            self._make_place()
            return self._take(files.digest, self._kept.pop(files.digest))
        try:
            _expected(files.digest, order)
            await self._make_room(files.num_bytes, store)
            self._make_place()
        except PdserveError:
            store.unload(files.digest)
            raise
        return self._take(files.digest, _Loaded(files.num_bytes, files.invocation))

    def _take(self, digest: str, loaded: _Loaded) -> str:
        self._loaded[digest] = loaded
        self.on_change()
        return digest

    def _make_place(self) -> None:
        """Have the one lose its place that was not used for the longest time, if need be.

        Raises AdaptersFull: all are in use.
        """
        if len(self._loaded) >= self._most:
            idle = self._idle()
            self._kept[idle] = self._loaded.pop(idle)
            self._leaving.discard(idle)

    async def _make_room(self, num_bytes: int, store: AdapterStore) -> None:
        """Have those leave memory that were not used for the longest time.

        Raises:
            AdapterRefused: it would find no room among none.
            AdaptersFull: it finds none now.
        """
        if num_bytes > self._most_bytes:
            raise AdapterRefused(
                f"the adapter has {num_bytes} bytes, and all of a node's may have "
                f"{self._most_bytes} (engine.adapter_memory)"
            )
        while num_bytes + self._num_bytes > self._most_bytes or len(self._kept) > MOST_KEPT:
            if self._kept:
                await self._free(next(iter(self._kept)), store)
            else:
                await self._drop(self._idle(), store)

    @property
    def _num_bytes(self) -> int:
        return sum(one.num_bytes for one in chain(self._loaded.values(), self._kept.values()))

    def _idle(self) -> str:
        """Return the one that was not used for the longest time. Raises AdaptersFull."""
        for digest in self._loaded:
            if not self._legs.has_adapter(digest):
                return digest
        raise AdaptersFull(
            f"an adapter finds no place: {len(self._loaded)} are loaded and in use, of at most "
            f"{self._most} in {self._most_bytes} bytes (engine.max_adapters, engine.adapter_memory)"
        )

    def _leg_closed(self, digest: str) -> None:
        if digest in self._leaving and not self._legs.has_adapter(digest):
            self._spawn(self._leave(digest))

    async def _leave(self, digest: str) -> None:
        async with self._turn:
            if digest in self._leaving and not self._legs.has_adapter(digest):
                assert self._store is not None, "it has loaded one"
                await self._drop(digest, self._store)

    async def _drop(self, digest: str, store: AdapterStore) -> None:
        """Take no more legs for an adapter, and give its memory back."""
        self._kept[digest] = self._loaded.pop(digest)
        self._leaving.discard(digest)
        self.on_change()
        await self._free(digest, store)

    async def _forget(self, digest: str) -> None:
        async with self._turn:
            if digest in self._kept:
                assert self._store is not None, "it has loaded one"
                await self._free(digest, self._store)

    async def _free(self, digest: str, store: AdapterStore) -> None:
        """Give back the memory of one that takes no legs any more."""
        await self._steps_done()  # they may have rows of legs that were cancelled
        del self._kept[digest]
        store.unload(digest)
        log.info("adapter %s has left", digest)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _expected(digest: str, order: LoadAdapter) -> str:
    """Return the digest of what was read, if it is what was ordered. Raises AdapterRefused."""
    if order.digest in ("", digest):
        return digest
    raise AdapterRefused(
        f"the files in {order.path} are not those that were loaded under this name: their digest "
        f"is {digest}, and not {order.digest}; load them again to serve them"
    )
