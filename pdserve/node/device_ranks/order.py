"""What a rank is told when it starts. No torch here."""

from __future__ import annotations

import msgspec

from pdserve.engine.ranks.shard import Shard
from pdserve.engine.steps.worst import WorstStep
from pdserve.kv_layout import KvLayout


class DeviceRankOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one rank needs; descriptors are inherited."""

    rank: int  # of the node
    num_ranks: int
    shard: Shard  # what it has of the model
    parent: int  # process id of rank 0
    memory_fd: int
    store_fd: int  # a file through which the ranks tell each other how they are reached
    device: str  # "cuda:N", or "cpu"
    pool_fd: int = -1  # on a CPU: its KV
    pool_handle: bytes = b""  # on a GPU: CUDA IPC's of its KV; empty: it allocates it
    num_blocks: int
    layout: KvLayout  # of its KV: its layers and heads
    checkpoint: str  # its directory
    model_id: str
    revision: str
    attention: str
    has_graphs: bool
    worst_step: WorstStep
    num_threads: int
    cores: tuple[int, ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """As RankProcesses.stages: in the step memory all ranks are alike."""
        return (self.num_ranks,)
