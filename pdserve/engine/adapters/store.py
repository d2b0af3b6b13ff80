"""The adapters that a decoder has: read, verified, and taken; all of one, or nothing."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Final, Protocol

from pdserve.engine.adapters.adapter import Adapter
from pdserve.engine.adapters.read import read_adapter
from pdserve.engine.plan.model import ModelPlan
from pdserve.model_files.checkpoint import Checkpoint
from pdserve.shared.errors import AdapterNotLoaded, CapacityError, ItemNotFound

MOST_BYTES: Final = 4 << 30


class AdapterTaker(Protocol):
    """What computes with adapters: a `Decoder`."""

    def take_adapter(self, adapter: Adapter) -> None:
        """See `Decoder.take_adapter`."""
        ...

    def drop_adapter(self, digest: str) -> None:
        """See `Decoder.drop_adapter`."""
        ...


class Adapters:
    """Loads adapters into a decoder. Who uses them, its caller knows (`NodeAdapters`).

    `load` may be called by any thread, beside steps and `unload`. One adapter loaded twice is one;
    the same name with other bytes is another digest, so both are there meanwhile.
    """

    def __init__(
        self,
        plan: ModelPlan,
        decoder: AdapterTaker,
        max_bytes: int = MOST_BYTES,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """
        Args:
            plan: of the whole model.
            decoder: that computes with them.
            max_bytes: of all adapters together, as float32.
            checkpoint: of the model; None: DoRA is refused.
        """
        self._plan = plan
        self._decoder = decoder
        self._max_bytes = max_bytes
        self._checkpoint = checkpoint
        self._num_bytes: dict[str, int] = {}  # by digest
        self._lock = Lock()
        self._turn = Lock()  # one is read at a time, which bounds memory

    def load(self, path: Path) -> Adapter:
        """Read, verify and take an adapter; all of it, or nothing. Waits for the disk.

        Raises:
            ItemNotFound: there is no such folder.
            AdapterRefused: it cannot be served with this model; says why.
            CapacityError: there is no room for it.
        """
        if not path.is_dir():
            raise ItemNotFound(f"there is no folder {path} on this node", "lora_path")
        with self._turn:
            adapter = read_adapter(path, self._plan, self._max_bytes, self._checkpoint)
            with self._lock:
                if adapter.digest in self._num_bytes:
                    return adapter
                self._check_room(adapter)
            self._decoder.take_adapter(adapter)
            with self._lock:
                self._num_bytes[adapter.digest] = adapter.num_bytes
            return adapter

    def unload(self, digest: str) -> None:
        """Have the decoder forget it. No request has it any more.

        Raises:
            AdapterNotLoaded: it is not here.
        """
        with self._lock:
            if self._num_bytes.pop(digest, None) is None:
                raise AdapterNotLoaded(f"adapter {digest} is not loaded on this node")
        self._decoder.drop_adapter(digest)

    def loaded(self) -> list[str]:
        """The digests of all, sorted."""
        with self._lock:
            return sorted(self._num_bytes)

    def _check_room(self, adapter: Adapter) -> None:
        used = sum(self._num_bytes.values())
        if used + adapter.num_bytes > self._max_bytes:
            raise CapacityError(
                f"adapters have {used} of {self._max_bytes} bytes, and this one needs "
                f"{adapter.num_bytes}: unload one first"
            )
