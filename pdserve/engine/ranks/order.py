"""What a rank is told when it starts. No torch here."""

from __future__ import annotations

import msgspec

from pdserve.engine.plan.forms import ActivationDtype, WeightForm
from pdserve.engine.ranks.shard import Shard
from pdserve.kv import KvLayout


class RankOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one rank needs; descriptors are inherited."""

    rank: int  # of this host
    stages: tuple[int, ...]  # of this host: the number of ranks of each
    shard: Shard  # what it has of the model
    parent: int  # process id of rank 0
    memory_fd: int
    pool_fd: int
    adapters_fd: int  # the socket through which rank 0 hands it adapters
    num_blocks: int
    layout: KvLayout  # of the pool: all heads, and the layers from this one on
    first_pool_layer: int
    checkpoint: str  # its directory
    model_id: str
    revision: str
    form: WeightForm
    activations: ActivationDtype
    kernels: str  # of `_native.kernel_variants()`
    packed_folder: str | None
    packed_limit: int  # bytes
    num_threads: int
    cores: tuple[int, ...]
