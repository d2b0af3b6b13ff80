"""The life of adapters: loaded, served, unloaded; on nodes that join, and on demand.

    load ──► all ready nodes have it, or say why not ──► written down ──► its name is served
    unload ──► its name is refused ──► what runs with it has ended ──► nodes need it no longer

A name is served once a request could be: a pair of nodes has its adapter, and no node says that it
cannot be used. A node that joins later loads those that were used last, as many as it keeps at a
time, and gets no request before. Nodes drop what was not used for long where others need the place.
An adapter that a request needs and no node has is loaded again, while the request waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from coordinator.adapters.bounds import AdapterBounds, in_use, not_found
from coordinator.adapters.known import KnownAdapters, Version
from coordinator.adapters.orders import AdapterOrders
from coordinator.nodes.registry import Member, Registry
from coordinator.ticks import ticking
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import AdapterLoaded
from pdserve.protocol.status import AdapterStatus
from pdserve.shared.clock import Clock
from pdserve.shared.errors import (
    AdaptersFull,
    InvalidRequest,
    ItemNotFound,
    ModelError,
    ModelNotFound,
    NoNodeAvailable,
    PdserveError,
    StoreUnavailable,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

LOOK_S: Final = 1.0  # between two looks at what other coordinators have written down
DECLARED_S: Final = 10.0  # before an adapter of the settings is tried again
AGAIN_S: Final = 1.0  # before a node is asked again for what it could not load


class Written(Protocol):
    """Where names are written down (`table.AdapterTable`). All may raise StoreUnavailable."""

    @property
    def is_shared(self) -> bool:
        """Whether other coordinators may write to it."""
        ...

    async def all(self) -> list[Version]:
        """Return all of them."""
        ...

    async def put(self, version: Version, *, in_place: bool, own_only: bool) -> bool:
        """Write what a name stands for; False: it stands for something, and is not replaced.

        `own_only`: `in_place` replaces only what the same tenant has loaded.
        """
        ...

    async def drop(self, name: str) -> None:
        """Delete a name."""
        ...


@dataclass(frozen=True, slots=True)
class Serving:
    """What the life of adapters needs to know of the model's nodes and requests."""

    registry: Registry
    can_route: Callable[[str], bool]  # whether a request with the adapter of this digest could go
    uses: Callable[[str], bool]  # whether one in flight has it


@dataclass(slots=True)
class _Change:
    """Of what a name stands for, under way."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_wanted: int = 0


class Adapters:
    """The adapters of one model. Belongs to the event loop."""

    def __init__(
        self,
        serving: Serving,
        orders: AdapterOrders,
        clock: Clock,
        is_taken: Callable[[str], bool],
        declared: Mapping[str, str],
    ) -> None:
        """
        Args:
            serving: the model's nodes and requests.
            orders: to these nodes.
            clock: for pauses.
            is_taken: whether a name is that of a model, or of another one's adapter.
            declared: name |-> path, of adapters that are loaded once there are nodes.
        """
        self.known: Final = KnownAdapters(clock, serving.uses)
        self.failures: dict[tuple[str, str], str] = {}  # by node id and name: why it has it not
        self._serving = serving
        self._orders = orders
        self._clock = clock
        self._bounds = AdapterBounds(self.known, is_taken)
        self._declared = dict(declared)
        self._table: Written | None = None
        self._changing: dict[str, _Change] = {}  # by name
        self._changed_names: set[str] = set()  # while the table is looked at
        self._is_looking = False
        self._under_way: set[tuple[Member, str]] = set()
        self._not_before_s: dict[object, float] = {}  # by member and digest, or by name
        self._greeted: set[Member] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._has_any = asyncio.Event()  # set once there has been anything to look at
        if declared:
            self._has_any.set()
        serving.registry.on_changed(self._changed)
        serving.registry.on_lost(self._lost)

    # ---- what is served ------------------------------------------------------------------------

    def find(self, name: str, call: bytes | None = None) -> Version | None:
        """Return the version that a call of this name is for; None: there is none (`known.find`).

        Raises NoNodeAvailable: its first version is being loaded.
        """
        version = self.known.find(name, call)
        if version is None and name in self._declared:
            raise NoNodeAvailable(f"the adapter {name!r} is not loaded yet: try again shortly")
        return version

    def begin(self, version: Version) -> None:
        """Note that a call begins that was planned with this version.

        Raises ModelNotFound: it was unloaded meanwhile, and is gone.
        """
        if self.known.of_digest(version.digest) is None:
            raise ModelNotFound(f"the adapter {version.name!r} was unloaded", "model")
        self.known.used(version.digest)

    def missing(self, digest: str) -> None:
        """Have all nodes load an adapter that a request needs, and none has."""
        version = self.known.of_digest(digest)
        if version is not None:
            for member in self._hosts():
                self._have(member, version)

    def states(self) -> list[AdapterStatus]:
        """Return what there is to tell of each adapter."""
        states = [
            AdapterStatus(
                name=version.name,
                digest=version.digest,
                num_bytes=version.num_bytes,
                nodes=[m.node_id for m in self._serving.registry if version.digest in m.adapters],
                refusals=self._refusals(version.name),
            )
            for version in self.known
        ]
        pending = [name for name in self._declared if name not in self.known]
        return states + [AdapterStatus(name=n, refusals=self._refusals(n)) for n in pending]

    def watch(self, metrics: CoordinatorMetrics) -> None:
        """Add the gauges of adapters."""
        metrics.watch("adapters", "Adapters that are served by name", lambda: len(self.known))
        metrics.watch(
            "cold_adapters",
            "Those that no pair of nodes has now: their next request waits for it",
            lambda: sum(not self._serving.can_route(version.digest) for version in self.known),
        )

    def _refusals(self, name: str) -> dict[str, str]:
        return {node_id: why for (node_id, of), why in self.failures.items() if of == name}

    # ---- load, unload --------------------------------------------------------------------------

    async def load(
        self,
        name: str,
        path: str,
        owner: str = "",
        *,
        in_place: bool = False,
        own_only: bool = False,
        most: int = 0,
    ) -> Version:
        """Have all nodes load the adapter in a folder of theirs, and serve it under a name.

        It is done to its end, also if nobody waits for it any more.

        Args:
            name: must stand for nothing yet, unless `in_place`.
            path: of the folder.
            owner: the tenant that loads it.
            in_place: it replaces what the name stands for; what runs goes on with that.
            own_only: but nothing that another tenant has loaded.
            most: adapters that the owner may have loaded; 0: any number.

        Raises:
            InvalidRequest: the name is in use, or cannot be one, or the adapter cannot be used.
            ItemNotFound: there is no such folder.
            PermissionDenied: another tenant has loaded what it would replace.
            AdaptersFull: there are as many as may be.
            NoNodeAvailable: no pair of nodes could load it.
            StoreUnavailable: it cannot be written down.
        """
        loading = self._load(name, path, owner, most, in_place=in_place, own_only=own_only)
        return await asyncio.shield(self._spawn(loading))

    async def unload(self, name: str, *, owner: str | None = None) -> None:
        """Serve a name no longer; what runs with its adapter ends as it began.

        `owner`: that must have loaded it; None: anybody may have.

        Raises:
            ModelNotFound: no adapter has this name.
            PermissionDenied: another tenant has loaded it.
            StoreUnavailable: it cannot be written down.
        """
        async with self._change(name):
            if name not in self.known:
                raise not_found(name)
            if owner is not None:
                self._bounds.check_owner(name, owner)
            if self._table is not None:
                await self._table.drop(name)
            self.known.retire(name)
            for failure in [failure for failure in self.failures if failure[1] == name]:
                del self.failures[failure]
            log.info("adapter %s is served no longer", name)
        self.settle()

    def settle(self) -> None:
        """Have nodes keep no longer what nothing needs any more."""
        for digest in self.known.take_unneeded():
            self._orders.unload(digest)

    # ---- the database --------------------------------------------------------------------------

    async def follow(self, table: Written) -> None:
        """Serve what is written down, also by coordinators before and besides this one."""
        self._table = table
        if table.is_shared:
            self._has_any.set()
        await self.look()

    def running(self) -> AbstractAsyncContextManager[None]:
        """While the context is open, follow other coordinators, and let go of what is unneeded."""

        def look() -> None:
            if self._table is not None and self._table.is_shared:
                self._spawn(self.look())
            else:
                self.settle()
            for name, path in self._declared.items():
                if self._not_before_s.get(name, 0.0) <= self._clock.now():
                    self._spawn(self._load_declared(name, path))

        return ticking(LOOK_S, "adapters", look, self._has_any)

    async def look(self) -> None:
        """Look what other coordinators have written down. A store that is away changes nothing.

        What changes here meanwhile is newer than what is read.
        """
        if self._table is None or self._is_looking:
            return
        self._is_looking = True
        self._changed_names.clear()
        try:
            written = {version.name: version for version in await self._table.all()}
        except StoreUnavailable as error:
            log.warning("adapters stay as they are: %s", error)
            return
        finally:
            self._is_looking = False
        newer = self._changed_names | self._changing.keys()
        for version in self.known:
            if version.name not in written and version.name not in newer:
                self.known.retire(version.name)
        for version in written.values():
            if self.known.find(version.name) != version and version.name not in newer:
                self._declared.pop(version.name, None)
                self._serve(version)
                for member in self._hosts():
                    self._have(member, version)
        self.settle()

    # ---- nodes ---------------------------------------------------------------------------------

    def _hosts(self) -> list[Member]:
        """The nodes that can load adapters now."""
        registry = self._serving.registry
        return [m for m in registry if (m.is_ready or m.is_standby) and m.most_adapters]

    def _changed(self, member: Member) -> None:
        if member in self._greeted or member not in self._hosts():
            return
        self._greeted.add(member)
        for version in self.known.lately_used()[: member.most_adapters]:
            self._have(member, version)
        for name, path in self._declared.items():
            self._spawn(self._load_declared(name, path))

    def _lost(self, member: Member) -> None:
        self._greeted.discard(member)
        for key in [key for key in self._not_before_s if isinstance(key, tuple)]:
            if key[0] is member:
                del self._not_before_s[key]
        for failure in [failure for failure in self.failures if failure[0] == member.node_id]:
            del self.failures[failure]

    def _have(self, member: Member, version: Version) -> None:
        """Have a node load a version, unless it is at it, or has failed just now."""
        key = member, version.digest
        if key not in self._under_way and self._not_before_s.get(key, 0.0) <= self._clock.now():
            self._under_way.add(key)
            self._spawn(self._have_loaded(member, version))

    async def _have_loaded(self, member: Member, version: Version) -> None:
        key = member, version.digest
        try:
            await self._orders.load(member, version.path, version.digest)
        except PdserveError as error:
            log.warning("%s is without adapter %s: %s", member.node_id, version.name, error)
            if member in self._serving.registry:
                self.failures[member.node_id, version.name] = error.message
                self._not_before_s[key] = self._clock.now() + AGAIN_S
            asyncio.get_running_loop().call_later(AGAIN_S * 1.1, self._again, version.digest)
        else:
            self.failures.pop((member.node_id, version.name), None)
            self._not_before_s.pop(key, None)
            self._let_go(version.digest)  # if it was unloaded meanwhile
        finally:
            self._under_way.discard(key)

    def _again(self, digest: str) -> None:
        if self._serving.uses(digest) and not self._serving.can_route(digest):
            self.missing(digest)

    async def _load_declared(self, name: str, path: str) -> None:
        if name in self._declared and self._serving.can_route("") and name not in self._changing:
            try:
                await self.load(name, path)
            except PdserveError as error:
                if name not in self._declared:  # another load of it came first
                    return
                level = logging.WARNING if isinstance(error, AdaptersFull) else logging.ERROR
                said = "adapter %s, which the settings name, is not served: %s"
                log.log(level, said, name, error)
                self.failures["", name] = error.message
                self._not_before_s[name] = self._clock.now() + DECLARED_S
            else:
                self.failures.pop(("", name), None)

    # ---- parts ---------------------------------------------------------------------------------

    async def _load(
        self, name: str, path: str, owner: str, most: int, *, in_place: bool, own_only: bool
    ) -> Version:
        async with self._change(name):
            self._bounds.check_name(name, owner, in_place=in_place, own_only=own_only)
            with self._bounds.loading(name, owner, most):
                version = await self._verified(name, path, owner)
                try:
                    await self._write(version, in_place=in_place, own_only=own_only)
                except PdserveError:
                    self._let_go(version.digest)
                    raise
                self._declared.pop(name, None)
                self._serve(version)
            log.info("adapter %s is served: %s from %s", name, version.digest, path)
        self.settle()
        return version

    async def _verified(self, name: str, path: str, owner: str) -> Version:
        """Return what nodes have loaded; all of them hold the same, or none keeps it."""
        if not self._serving.can_route(""):
            raise NoNodeAvailable(
                "no pair of nodes is ready to load an adapter: try again shortly, and where models "
                "sleep after a call that wakes this one"
            )
        hosts = self._hosts()
        orders = [self._orders.load(member, path) for member in hosts]
        answers = await asyncio.gather(*orders, return_exceptions=True)
        loaded = [answer for answer in answers if isinstance(answer, AdapterLoaded)]
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        digests = sorted({answer.digest for answer in loaded})
        try:
            if len(digests) > 1:
                raise InvalidRequest(
                    f"{path} holds different adapters on different nodes: {', '.join(digests)}",
                    "lora_path",
                )
            # Where none had an error it is verified, though others may have taken its place since.
            if not digests or (errors and not self._serving.can_route(digests[0])):
                raise _refusal(errors)
            self._bounds.check_bytes(name, loaded[0].num_bytes)
        except PdserveError:
            for digest in digests:
                self._let_go(digest)
            raise
        for member, answer in zip(hosts, answers, strict=True):
            if isinstance(answer, PdserveError) and member in self._serving.registry:
                self.failures[member.node_id, name] = answer.message
        first, now_s = loaded[0], int(time.time())
        begin = tuple(first.invocation)
        return Version(name, path, digests[0], first.num_bytes, owner, now_s, begin)

    async def _write(self, version: Version, *, in_place: bool, own_only: bool) -> None:
        if self._table is not None and not await self._table.put(
            version, in_place=in_place, own_only=own_only
        ):
            raise in_use(version.name)  # by another coordinator, just now

    def _serve(self, version: Version) -> None:
        self.known.serve(version)
        self._has_any.set()

    def _let_go(self, digest: str) -> None:
        if self.known.of_digest(digest) is None:
            self._orders.unload(digest)

    @asynccontextmanager
    async def _change(self, name: str) -> AsyncIterator[None]:
        """Change what a name stands for; one does at a time."""
        change = self._changing.setdefault(name, _Change())
        change.num_wanted += 1
        try:
            async with change.lock:
                yield
        finally:
            if self._is_looking:
                self._changed_names.add(name)
            change.num_wanted -= 1
            if not change.num_wanted:
                del self._changing[name]

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _refusal(errors: Sequence[BaseException]) -> PdserveError:
    """Return what tells best why no pair of nodes has loaded an adapter."""
    for error in errors:
        if isinstance(error, ModelError):
            return InvalidRequest(error.message, "lora_path")
        if isinstance(error, (ItemNotFound, AdaptersFull)):
            return error
        if not isinstance(error, PdserveError):
            raise error
    why = f": {errors[0]}" if errors else ""
    return NoNodeAvailable(f"no pair of nodes has loaded the adapter{why}")
