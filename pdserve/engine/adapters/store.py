"""The adapters of a node: which are loaded, who uses them, and when they leave."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final, Protocol

from pdserve.engine.adapters.adapter import Adapter
from pdserve.engine.adapters.read import read_adapter
from pdserve.engine.plan.model import ModelPlan
from pdserve.shared.errors import AdapterNotLoaded, CapacityError

MOST_ADAPTERS: Final = 64
MOST_BYTES: Final = 4 << 30


class AdapterTaker(Protocol):
    """What computes with adapters: a `Decoder`."""

    def take_adapter(self, adapter: Adapter) -> None:
        """See `Decoder.take_adapter`."""
        ...

    def drop_adapter(self, digest: str) -> None:
        """See `Decoder.drop_adapter`."""
        ...


@dataclass(slots=True)
class Loaded:
    """An adapter that the decoder has."""

    digest: str
    num_bytes: int
    num_holders: int = 0  # requests that need it
    is_leaving: bool = False  # it goes with the last of them, and takes no new ones


class Adapters:
    """Loads adapters, and keeps those that requests need.

    `load` may be called by any thread, beside steps and the other methods. One adapter loaded twice
    is one; the same name with other bytes is another digest, so both are there meanwhile.
    """

    def __init__(
        self,
        plan: ModelPlan,
        decoder: AdapterTaker,
        max_adapters: int = MOST_ADAPTERS,
        max_bytes: int = MOST_BYTES,
    ) -> None:
        """`plan` is of the whole model; `max_bytes` bounds all adapters together, as float32."""
        self._plan = plan
        self._decoder = decoder
        self._max_adapters = max_adapters
        self._max_bytes = max_bytes
        self._loaded: dict[str, Loaded] = {}
        self._lock = Lock()
        self._turn = Lock()  # one is read at a time, which bounds memory

    def load(self, path: Path) -> Adapter:
        """Read, verify and take an adapter; all of it, or nothing. Waits for the disk.

        Raises:
            AdapterRefused: it cannot be served with this model; says why.
            CapacityError: there is no room for it.
        """
        with self._turn:
            adapter = read_adapter(path, self._plan, self._max_bytes)
            if self._revive(adapter.digest):
                return adapter
            with self._lock:
                self._check_room(adapter)
            self._decoder.take_adapter(adapter)
            with self._lock:
                self._loaded[adapter.digest] = Loaded(adapter.digest, adapter.num_bytes)
            return adapter

    def unload(self, digest: str) -> None:
        """Take no new requests for it. It leaves once the last one has ended.

        Raises:
            AdapterNotLoaded: it is not here.
        """
        with self._lock:
            self._find(digest).is_leaving = True
            self._leave_if_idle(digest)

    def get(self, digest: str) -> Loaded | None:
        """Return what is known of one, those that leave included; None: it is not here."""
        return self._loaded.get(digest)

    def hold(self, digest: str) -> None:
        """Keep it for one more request. The empty digest is the model itself.

        Raises:
            AdapterNotLoaded: it is not here, or is leaving.
        """
        if not digest:
            return
        with self._lock:
            found = self._find(digest)
            if found.is_leaving:
                raise AdapterNotLoaded(f"adapter {digest} is being unloaded from this node")
            found.num_holders += 1

    def release(self, digest: str) -> None:
        """Note that a request that held it has ended."""
        if not digest:
            return
        with self._lock:
            found = self._find(digest)
            assert found.num_holders > 0, "it was held"
            found.num_holders -= 1
            self._leave_if_idle(digest)

    def loaded(self) -> list[str]:
        """The digests of those that requests may name, sorted."""
        with self._lock:
            return sorted(d for d, each in self._loaded.items() if not each.is_leaving)

    def _find(self, digest: str) -> Loaded:
        if (found := self._loaded.get(digest)) is None:
            raise AdapterNotLoaded(f"adapter {digest} is not loaded on this node: load it first")
        return found

    def _revive(self, digest: str) -> bool:
        with self._lock:
            found = self._loaded.get(digest)
            if found is not None:
                found.is_leaving = False
            return found is not None

    def _check_room(self, adapter: Adapter) -> None:
        if len(self._loaded) >= self._max_adapters:
            raise CapacityError(
                f"{len(self._loaded)} adapters are loaded, which is the limit: unload one first"
            )
        used = sum(each.num_bytes for each in self._loaded.values())
        if used + adapter.num_bytes > self._max_bytes:
            raise CapacityError(
                f"adapters have {used} of {self._max_bytes} bytes, and this one needs "
                f"{adapter.num_bytes}: unload one first"
            )

    def _leave_if_idle(self, digest: str) -> None:
        if (found := self._loaded[digest]).is_leaving and found.num_holders == 0:
            del self._loaded[digest]
            self._decoder.drop_adapter(digest)
