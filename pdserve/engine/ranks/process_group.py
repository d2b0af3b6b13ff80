"""Collectives by torch.distributed: NCCL between GPUs, gloo between processes on CPUs.

The groups are objects of our own rather than torch's global one, so nothing is left behind in the
process, and threads of one process can be ranks, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import (  # what torch.distributed itself consists of
    Backend,
    GatherOptions,
    ProcessGroup,
    ProcessGroupGloo,
    ReduceOp,
    Store,
)

from pdserve.engine.ranks.shard import Shard
from pdserve.errors import NodeSick
from pdserve.protocol import Sickness

JOIN_S: Final = 60.0  # for all ranks to meet, once each has its weights
COLLECTIVE_S: Final = 60.0  # for one collective; a rank that has ended is noticed at once elsewhere
_LOOPBACK: Final = "lo"


class GroupCollectives:
    """Collectives of the ranks of one host, each of which has a device of its own."""

    def __init__(self, group: ProcessGroup, shard: Shard, device: torch.device) -> None:
        """Use `join_ranks`."""
        self.shard = shard
        self._group = group
        self._device = device

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """As Collectives.all_reduce. On a GPU the current stream waits, not the caller."""
        with _together():
            self._group.allreduce(tensor).wait()
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """As Collectives.gather."""
        is_root = self.shard.rank == 0
        parts = [torch.empty_like(tensor) for _ in range(self.shard.num_ranks)] if is_root else []
        with _together():
            self._group.gather([parts] if is_root else [], [tensor], GatherOptions()).wait()
        return parts

    def close(self) -> None:
        """Leave the others, which do not have to answer. Nothing may be computing."""
        if self._device.type == "cuda":
            self._group.abort()

    def largest(self, number: int) -> int:
        """As Collectives.largest."""
        numbers = torch.tensor([number], dtype=torch.int64, device=self._device)
        with _together():
            self._group.allreduce(numbers, ReduceOp.MAX).wait()
        return int(numbers.item())


def join_ranks(
    store: Store, shard: Shard, device: torch.device, check: Callable[[], None]
) -> GroupCollectives:
    """Meet the other ranks, all of which do the same now.

    Args:
        store: through which all of them can tell where they are.
        shard: this rank.
        device: its device.
        check: called now and then; raises if it is in vain.

    Raises:
        NodeSick: a rank has not come in time.
    """
    joined: list[ProcessGroup] = []
    failed: list[RuntimeError] = []

    def join() -> None:
        try:
            joined.append(_group(store, shard, device))
        except RuntimeError as error:
            failed.append(error)

    # In a thread of its own, since nothing can end the wait for a rank that does not come.
    joining = threading.Thread(target=join, name="join-ranks", daemon=True)
    joining.start()
    while joining.is_alive():
        joining.join(0.1)
        check()
    if failed:
        raise NodeSick(f"{Sickness.RANK_LOST}: the ranks do not meet: {failed[0]}") from failed[0]
    return GroupCollectives(joined[0], shard, device)


def _group(store: Store, shard: Shard, device: torch.device) -> ProcessGroup:
    store.set_timeout(timedelta(seconds=JOIN_S))
    group = ProcessGroup(store, shard.rank, shard.num_ranks)
    backend: Backend
    if device.type == "cuda":
        kind, backend = ProcessGroup.BackendType.NCCL, _nccl(store, shard, device)
    else:
        kind, backend = ProcessGroup.BackendType.GLOO, _gloo(store, shard)
    group._set_default_backend(kind)
    group._register_backend(torch.device(device.type), kind, backend)
    return group


def _nccl(store: Store, shard: Shard, device: torch.device) -> Backend:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # builds for CPUs have none

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=COLLECTIVE_S)
    with torch.cuda.device(device):
        backend = ProcessGroupNCCL(store, shard.rank, shard.num_ranks, options)
        backend.eager_connect_single_device(device)  # now, since a capture cannot wait for it
    return backend


def _gloo(store: Store, shard: Shard) -> Backend:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=COLLECTIVE_S)
    options._devices = [ProcessGroupGloo.create_device(interface=_LOOPBACK)]
    return ProcessGroupGloo(store, shard.rank, shard.num_ranks, options)


@contextmanager
def _together() -> Iterator[None]:
    """torch has RuntimeErrors for whatever goes wrong with another rank."""
    try:
        yield
    except RuntimeError as error:
        raise NodeSick(f"{Sickness.RANK_LOST}: ranks cannot compute together: {error}") from None
