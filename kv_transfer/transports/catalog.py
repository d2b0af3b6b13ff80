"""The list of transports, best first, and which of them this process can use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kv_transfer.cuda import catalog as cuda
from kv_transfer.host import host_id
from kv_transfer.memory import KvPool, MemoryKind
from kv_transfer.transports.cuda_ipc import CudaIpcServer, CudaIpcTransport
from kv_transfer.transports.interface import Reader, Source, Transport, TransportServer
from kv_transfer.transports.nccl.puller import NcclTransport
from kv_transfer.transports.nccl.server import NcclServer
from kv_transfer.transports.shm import ShmServer, ShmTransport
from kv_transfer.transports.tcp import TcpTransport
from kv_transfer.transports.tcp_server import TcpServer
from kv_transfer.transports.ucx.agent import missing as ucx_missing
from kv_transfer.transports.ucx.agent import pid_namespace, rdma_devices
from kv_transfer.transports.ucx.puller import UcxTransport
from kv_transfer.transports.ucx.server import UcxServer
from pdserve.shared.errors import ConfigError

ServerFactory = Callable[[Source], TransportServer]
TransportFactory = Callable[[Reader], Transport]


def _nothing() -> str | None:
    return None


def _ucx_is_idle(pool: KvPool) -> str | None:
    """Starting an agent takes half a second; without RDMA it would reach this host only."""
    if pool.kind == "cpu" and not rdma_devices():
        return "no RDMA device, and on one host shm is faster; name it explicitly to use it"
    return None


def _everywhere(_: KvPool) -> str:
    return ""


def _host(_: KvPool) -> str:
    return host_id()


def _ucx_domain(pool: KvPool) -> str:
    """Without RDMA, the kernel copies between processes of one PID namespace."""
    return "" if rdma_devices() else f"{host_id()} {pool.kind} {pid_namespace()}"


@dataclass(frozen=True, slots=True)
class TransportKind:
    """Both ends of one transport, and its requirements."""

    name: str
    server: ServerFactory
    client: TransportFactory
    memory: frozenset[MemoryKind]  # kinds of pools that it supports
    missing: Callable[[], str | None] = _nothing  # what this process lacks for it; None: nothing
    # Why it is not offered unless it is named in the config; None: it is offered.
    idle: Callable[[KvPool], str | None] = lambda _: None
    # Nodes of one domain reach each other, as far as can be told without trying; "": all do.
    domain: Callable[[KvPool], str] = _everywhere
    port_offset: int = 0  # its port is that far from the first one of all transports

    def obstacle(self, pool: KvPool) -> str | None:
        """Why this process cannot use it for this pool, or a part of it; None: it can."""
        if pool.kind not in self.memory:
            return f"moves {' or '.join(sorted(self.memory))} memory, the pool is {pool.kind}"
        return self.missing()

    def unless_idle(self, pool: KvPool) -> TransportKind:
        """This kind, with an obstacle if it would be of no use for the pool."""
        reason = self.idle(pool)
        return self if reason is None else replace(self, missing=lambda: reason)


KINDS = (  # best first
    TransportKind("shm", ShmServer, ShmTransport, frozenset({"cpu"}), domain=_host),
    TransportKind(
        "cuda_ipc",
        CudaIpcServer,
        CudaIpcTransport,
        frozenset({"cuda"}),
        cuda.missing,
        domain=_host,
    ),
    TransportKind(
        "ucx",
        UcxServer,
        UcxTransport,
        frozenset({"cpu", "cuda"}),
        ucx_missing,
        _ucx_is_idle,
        _ucx_domain,
        port_offset=2,
    ),
    TransportKind(
        "nccl",
        NcclServer,
        NcclTransport,
        frozenset({"cuda"}),
        cuda.nccl_missing,
        port_offset=1,
    ),
    TransportKind("tcp", TcpServer, TcpTransport, frozenset({"cpu"})),
)

PORTS_OF_A_PART = 1 + max(kind.port_offset for kind in KINDS)

IN_CLEAR = frozenset({"ucx", "nccl"})  # what reaches other machines, and has no TLS


def choose_kinds(names: Sequence[str], pool: KvPool) -> list[TransportKind]:
    """The transports with these names, in this order; without names, all that are useful.

    Raises:
        ConfigError: a named transport is unknown, or cannot be used here.
    """
    by_name = {kind.name: kind for kind in KINDS}
    for name in names:
        if name not in by_name:
            raise ConfigError(f"there is no transport {name!r}: choose from {', '.join(by_name)}")
        obstacle = by_name[name].obstacle(pool)
        if obstacle is not None:
            raise ConfigError(f"transport {name!r} cannot be used here: {obstacle}")
    if not names:
        return [kind.unless_idle(pool) for kind in KINDS]
    return [by_name[name] for name in names]
