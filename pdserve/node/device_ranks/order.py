"""What a rank is told when it starts. No torch here."""

from __future__ import annotations

import msgspec

from pdserve.engine.plan.forms import ActivationDtype, WeightForm
from pdserve.engine.ranks.shard import Shard
from pdserve.engine.steps.worst import LargestStep
from pdserve.kv import KvLayout


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ranks of a node meet: on one host in a file, on several at a server of rank 0's."""

    num_ranks: int  # of the node
    store_fd: int = -1  # on one host: of the file, which all have inherited
    store: str = ""  # on several: host:port of the server
    own_host: str = ""  # on several: the address at which other hosts reach this one


class DeviceRankOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one rank needs; descriptors are inherited."""

    rank: int  # among the processes of this host
    num_processes: int  # of this host, which share the step memory
    shard: Shard  # what it has of the model
    parent: int  # process id of this host's first process
    memory_fd: int
    adapters_fd: int  # the socket through which this host's first process hands it adapters
    rendezvous: Rendezvous
    device: str  # "cuda:N", or "cpu"
    pool_fd: int = -1  # on a CPU: its KV
    pool_handle: bytes = b""  # on a GPU: CUDA IPC's of its KV; empty: it allocates it
    num_blocks: int
    layout: KvLayout  # of its KV: its layers and heads
    form: WeightForm
    activations: ActivationDtype
    checkpoint: str  # its directory
    model_id: str
    revision: str
    attention: str
    has_graphs: bool
    worst_step: LargestStep
    tap_layers: tuple[int, ...]
    num_threads: int
    cores: tuple[int, ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """As RankProcesses.stages: in the step memory all processes are alike."""
        return (self.num_processes,)
