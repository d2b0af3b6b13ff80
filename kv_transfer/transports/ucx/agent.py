"""The part of NIXL that the ucx transport uses: one agent, its memory, and its transfers.

How an agent is configured, and why:

* `TLS=^tcp`: otherwise UCX would emulate one-sided reads over TCP, slower than our own TCP and
  using the exporter's CPU. The setting applies to this agent's UCX context only, not to other users
  of UCX in the process.
* No progress thread: UCX's event descriptor misses events, so NIXL's thread polls every
  millisecond, for ever. The owner polls the agent only while there is something to wait for.
* Error handling "peer" with RDMA. Without RDMA, UCX uses shared memory for its own messages, for
  which it has no peer failure handling; a dead peer shows as an error of the next read.

NIXL is not thread-safe: an agent belongs to one thread at a time.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from pdserve.shared.errors import PeerLost, TransportUnavailable
from pdserve.shared.hints.extras import how_to_install

log = logging.getLogger(__name__)

Descriptors = NDArray[np.uint64]  # [n, 3] (address, nbytes, device)
Segment = Literal["DRAM", "VRAM"]

_PACKAGES = ("nixl_cu13", "nixl_cu12")
_INSTALL = (
    f"NIXL is not installed: {how_to_install('ucx')} (NIXL: ucx-py is dead and ucxx's Python has "
    "no one-sided calls)"
)
_INFINIBAND = Path("/sys/class/infiniband")
_PID_NAMESPACE = Path("/proc/self/ns/pid")


@dataclass(frozen=True, slots=True)
class UcxRegion:
    """Memory that is, or will be, registered with an agent."""

    address: int
    num_bytes: int
    segment: Segment = "DRAM"
    device: int = 0  # CUDA ordinal

    @staticmethod
    def of(array: NDArray[Any]) -> UcxRegion:
        """The region of a contiguous array in CPU memory."""
        return UcxRegion(array.ctypes.data, array.nbytes)

    def describe(self, offsets: NDArray[np.int64], nbytes: NDArray[np.int64]) -> Descriptors:
        """NIXL's descriptors of the pieces at these offsets."""
        pieces = np.empty((len(offsets), 3), dtype=np.uint64)
        pieces[:, 0] = offsets + self.address
        pieces[:, 1] = nbytes
        pieces[:, 2] = self.device
        return pieces


class NothingPosted(PeerLost):
    """A read could not be prepared: nothing of it is in flight."""


class UcxAgent(Protocol):
    """What the driver needs of an agent. Tests have one that hangs."""

    @property
    def has_late_writes(self) -> bool:
        """Whether hardware may still write to our memory after a read has failed."""
        ...

    def add_peer(self, metadata: bytes) -> str:
        """Add a peer; returns its name. Raises PeerLost: invalid metadata, or not reachable."""
        ...

    def remove_peer(self, name: str) -> None:
        """Disconnect from a peer."""
        ...

    def register(self, region: UcxRegion) -> None:
        """Register memory. Raises TransportUnavailable: it cannot be registered."""
        ...

    def post_read(
        self, peer: str, local: Descriptors, segment: Segment, remote: Descriptors, source: Segment
    ) -> Any:
        """Start copying remote pieces to local ones of the same sizes; returns a handle.

        Raises:
            NothingPosted: the read cannot be prepared.
            PeerLost: it failed, possibly after copying some of it.
        """
        ...

    def is_done(self, posted: Any) -> bool:
        """Whether a posted read has ended; if so, it is released. Raises PeerLost: it failed."""
        ...

    def destroy(self) -> None:
        """Destroy the agent: after this, nothing writes to its registered memory."""
        ...


def missing() -> str | None:
    """What this process lacks for NIXL, as far as can be told without loading it; None: nothing."""
    if _find_package() is None:
        return _INSTALL
    if "UCX_TLS" in os.environ:
        return (
            "UCX_TLS is set in the environment, and would override the transports that UCX may "
            "use: unset it"
        )
    return None


def rdma_devices(root: Path = _INFINIBAND) -> list[str]:
    """The RDMA devices that have an active port."""
    return sorted(
        {
            state.parents[2].name
            for state in root.glob("*/ports/*/state")
            if "ACTIVE" in state.read_text()
        }
    )


def pid_namespace() -> str:
    """This process's PID namespace, which cross-memory attach needs to be equal; empty: unknown."""
    try:
        return os.readlink(_PID_NAMESPACE)
    except OSError:
        return ""


class NixlAgent:
    """One NIXL agent with its UCX backend.

    Raises:
        TransportUnavailable: NIXL is not installed, or finds no transport that is not TCP.
    """

    def __init__(self, name: str) -> None:
        api = _load()
        self._errors = _errors_of(api)
        has_rdma = bool(rdma_devices())
        # Without RDMA or a GPU, a read is a system call, so nothing is written after it fails.
        self.has_late_writes = has_rdma
        self._agent: Any = None
        try:
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._agent = api.nixl_agent(name, config)
            self._agent.create_backend(
                "UCX",
                {
                    "ucx_error_handling_mode": "peer" if has_rdma else "none",
                    "engine_config": "TLS=^tcp",
                },
            )
        except self._errors as error:
            self._agent = None
            raise TransportUnavailable(
                f"NIXL has no means but TCP here, or cannot start: {error!r}"
            ) from error

    @property
    def metadata(self) -> bytes:
        """How peers can reach this agent and the memory registered so far."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def register(self, region: UcxRegion) -> None:
        """Register memory. With RDMA, all pages are allocated and pinned now."""
        self.has_late_writes |= region.segment == "VRAM"
        piece = (region.address, region.num_bytes, region.device, "")
        try:
            self._agent.register_memory([piece], region.segment)
        except self._errors as error:
            raise TransportUnavailable(
                f"{region.num_bytes} bytes of {region.segment} cannot be registered with UCX: "
                f"{error!r}"
            ) from error

    def add_peer(self, metadata: bytes) -> str:
        """Add a peer; returns its name."""
        try:
            name = self._agent.add_remote_agent(metadata)
        except self._errors as error:
            raise PeerLost(f"UCX cannot reach the exporter: {error!r}") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        """Disconnect from a peer."""
        try:
            self._agent.remove_remote_agent(name)
        except self._errors as error:
            log.debug("UCX peer %s cannot be removed: %r", name, error)

    def post_read(
        self, peer: str, local: Descriptors, segment: Segment, remote: Descriptors, source: Segment
    ) -> Any:
        """Start copying remote pieces to local ones; over CMA, copy here. Returns a handle."""
        agent = self._agent
        try:
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(local, segment),
                agent.get_xfer_descs(remote, source),
                peer,
            )
        except self._errors as error:
            raise NothingPosted(f"the read over UCX cannot be prepared: {error!r}") from error
        try:
            state = agent.transfer(handle)
        except self._errors as error:
            raise PeerLost(f"the read over UCX broke: {error!r}") from error
        if state == "ERR":
            self._release(handle)
            raise PeerLost("the read over UCX broke")
        return handle

    def is_done(self, posted: Any) -> bool:
        """Whether a posted read has ended; if so, it is released."""
        try:
            state = self._agent.check_xfer_state(posted)
        except self._errors as error:
            self._release(posted)
            raise PeerLost(f"the read over UCX broke: {error!r}") from error
        if state == "PROC":
            return False
        self._release(posted)
        if state != "DONE":
            raise PeerLost("the read over UCX broke")
        return True

    def progress(self) -> None:
        """Let UCX answer its peers, which is necessary while they connect."""
        try:
            self._agent.get_new_notifs()
        except self._errors as error:
            log.warning("UCX cannot be polled: %r", error)

    def destroy(self) -> None:
        """Destroy the agent: the UCX worker is destroyed with its last reference."""
        self._agent = None

    def _release(self, handle: Any) -> None:
        try:
            handle.release()
        except self._errors as error:
            log.debug("a UCX transfer cannot be released: %r", error)


def _find_package() -> str | None:
    return next((name for name in _PACKAGES if importlib.util.find_spec(name)), None)


@cache
def _load() -> Any:
    """NIXL's Python API. Raises TransportUnavailable."""
    package = _find_package()
    if package is None:
        raise TransportUnavailable(_INSTALL)
    # A distribution's RDMA drivers load a second libnl-route beside NIXL's, and then the process
    # crashes at exit; but not if the distribution's library is loaded first.
    with suppress(OSError):
        ctypes.CDLL("libnl-route-3.so.200")
    # NIXL's logging module writes to standard output, closes all existing handlers on import and
    # disables logging's own errors. It is replaced by this one, which logs in the usual way.
    quiet = ModuleType(f"{package}.logging")
    quiet.get_logger = logging.getLogger  # type: ignore[attr-defined]
    sys.modules.setdefault(quiet.__name__, quiet)
    try:
        return importlib.import_module(f"{package}._api")
    except (ImportError, OSError) as error:
        raise TransportUnavailable(f"{package} is installed but cannot load: {error}") from error


def _errors_of(api: Any) -> tuple[type[Exception], ...]:
    """NIXL's error classes, which have no common base class."""
    found: Sequence[type[Exception]] = [
        thing
        for thing in vars(api.nixlBind).values()
        if isinstance(thing, type) and issubclass(thing, Exception)
    ]
    return (*found, RuntimeError)
