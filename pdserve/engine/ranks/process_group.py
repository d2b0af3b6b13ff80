"""Collectives by torch.distributed: NCCL between GPUs, gloo between processes on CPUs.

The groups are objects of our own rather than torch's global one, so nothing is left behind in the
process, and threads of one process can be ranks, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import (  # what torch.distributed itself consists of
    Backend,
    BroadcastOptions,
    GatherOptions,
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    ReduceOp,
    Store,
)

from pdserve.engine.ranks.shard import Shard
from pdserve.protocol import Sickness
from pdserve.shared.errors import NodeSick

JOIN_S: Final = 60.0  # for all ranks to meet, once each has its weights
LOAD_S: Final = 3600.0  # for those of other hosts to load theirs; one that has ended is noticed
COLLECTIVE_S: Final = 60.0  # for one collective; a rank that has ended is noticed at once elsewhere
AGREE_S: Final = 600.0  # for rank 0 to choose: libraries may compile what they are tried with
_LOOPBACK: Final = "lo"


@dataclass(frozen=True, slots=True)
class _Groups:
    stage: ProcessGroup | None  # the tensor-parallel ranks of this stage, if they are several
    ring: ProcessGroup | None  # the ranks of this number in all stages, likewise

    @property
    def present(self) -> list[ProcessGroup]:
        return [group for group in (self.stage, self.ring) if group is not None]


class GroupCollectives:
    """Collectives of the ranks of a node, each of which has a device of its own."""

    def __init__(self, groups: _Groups, shard: Shard, device: torch.device, store: Store) -> None:
        """Use `join_ranks`."""
        self.shard = shard
        self._store = store
        self._groups = groups
        self._device = device

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Make a contiguous tensor the sum over the ranks of the stage, in place; returns it.

        On a GPU the current stream waits, not the caller.
        """
        if self._groups.stage is not None:
            with _together():
                self._groups.stage.allreduce(tensor).wait()
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the contiguous tensors of the ranks of the stage, of one shape, in order."""
        if self._groups.stage is None:
            return [tensor]
        is_root = self.shard.rank == 0
        parts = [torch.empty_like(tensor) for _ in range(self.shard.num_ranks)] if is_root else []
        with _together():
            self._groups.stage.gather([parts] if is_root else [], [tensor], GatherOptions()).wait()
        return parts

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Make a contiguous tensor that of the stage's rank 0, in place; returns it.

        On a GPU the current stream waits, not the caller.
        """
        if self._groups.stage is not None:
            with _together():
                self._groups.stage.broadcast([tensor], BroadcastOptions()).wait()
        return tensor

    def close(self) -> None:
        """Leave the others, which do not have to answer. Nothing may be computing."""
        if self._device.type == "cuda":
            for group in self._groups.present:
                group.abort()

    def largest(self, number: int) -> int:
        """Return the largest of all ranks' numbers, and wait for it."""
        numbers = torch.tensor([number], dtype=torch.int64, device=self._device)
        with _together():
            for group in self._groups.present:  # of the stage, and then of the stages' largest
                group.allreduce(numbers, ReduceOp.MAX).wait()
        return int(numbers.item())

    def agree(self, what: str, choose: Callable[[], str]) -> str:
        """Return what `choose` returns on rank 0 of the first stage, which alone calls it."""
        key = f"agreed {what}"
        if self.shard.rank == self.shard.stage == 0:
            chosen = choose()
            with _together():
                self._store.set(key, chosen)
            return chosen
        with _together():
            self._store.wait([key], timedelta(seconds=AGREE_S))
            return self._store.get(key).decode()

    def send(self, tensor: Tensor) -> None:
        """Send a contiguous tensor to the same rank of the next stage; that of the last: the first.

        On a GPU the current stream waits, not the caller.
        """
        assert self._groups.ring is not None, "one stage has nobody to send to"
        to_stage = (self.shard.stage + 1) % self.shard.num_stages
        with _together():
            self._groups.ring.send([tensor], to_stage, 0).wait()

    def receive(self, tensor: Tensor) -> Tensor:
        """Fill a contiguous tensor with what the same rank of the stage before sends; returns it.

        On a GPU the current stream waits, not the caller.
        """
        assert self._groups.ring is not None, "one stage has nobody to receive from"
        from_stage = (self.shard.stage - 1) % self.shard.num_stages
        with _together():
            self._groups.ring.recv([tensor], from_stage, 0).wait()
        return tensor


def join_ranks(
    store: Store,
    shard: Shard,
    device: torch.device,
    check: Callable[[], None],
    own_host: str = "",
) -> GroupCollectives:
    """Meet the other ranks, all of which do the same now; on several hosts, when they have loaded.

    Args:
        store: through which all of them can tell where they are.
        shard: this rank.
        device: its device.
        check: called now and then; raises if it is in vain.
        own_host: the address of this host for ranks on others; empty: there are none.

    Raises:
        NodeSick: a rank has not come in time.
    """
    joined: list[_Groups] = []
    failed: list[RuntimeError] = []

    def join() -> None:
        try:
            if own_host:
                _wait_for_all(store, shard)
            joined.append(_groups(store, shard, device, own_host))
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
    return GroupCollectives(joined[0], shard, device, store)


def _wait_for_all(store: Store, shard: Shard) -> None:
    """Wait until the ranks of all hosts are here."""
    ranks = range(shard.num_ranks * shard.num_stages)
    store.set(_here(shard.stage * shard.num_ranks + shard.rank), "")
    store.wait([_here(rank) for rank in ranks], timedelta(seconds=LOAD_S))


def _here(rank: int) -> str:
    return f"rank {rank} is here"


def _groups(store: Store, shard: Shard, device: torch.device, own_host: str) -> _Groups:
    """All ranks join that of their stage first, so nobody waits for somebody who waits for it."""
    store.set_timeout(timedelta(seconds=JOIN_S))
    stage: ProcessGroup | None = None
    ring: ProcessGroup | None = None
    if shard.num_ranks > 1:
        own = PrefixStore(f"stage {shard.stage}", store)
        stage = _group(own, shard.rank, shard.num_ranks, device, own_host)
    if shard.num_stages > 1:
        own = PrefixStore(f"rank {shard.rank}", store)
        ring = _group(own, shard.stage, shard.num_stages, device, own_host)
    return _Groups(stage, ring)


def _group(
    store: Store, rank: int, num_ranks: int, device: torch.device, own_host: str
) -> ProcessGroup:
    group = ProcessGroup(store, rank, num_ranks)
    backend: Backend
    if device.type == "cuda":
        kind, backend = ProcessGroup.BackendType.NCCL, _nccl(store, rank, num_ranks, device)
    else:
        kind, backend = ProcessGroup.BackendType.GLOO, _gloo(store, rank, num_ranks, own_host)
    group._set_default_backend(kind)
    group._register_backend(torch.device(device.type), kind, backend)
    return group


def _nccl(store: Store, rank: int, num_ranks: int, device: torch.device) -> Backend:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # builds for CPUs have none

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=COLLECTIVE_S)
    with torch.cuda.device(device):
        backend = ProcessGroupNCCL(store, rank, num_ranks, options)
        backend.eager_connect_single_device(device)  # now, since a capture cannot wait for it
    return backend


def _gloo(store: Store, rank: int, num_ranks: int, own_host: str) -> Backend:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=COLLECTIVE_S)
    where = {"hostname": own_host} if own_host else {"interface": _LOOPBACK}
    options._devices = [ProcessGroupGloo.create_device(**where)]
    return ProcessGroupGloo(store, rank, num_ranks, options)


@contextmanager
def _together() -> Iterator[None]:
    """torch has RuntimeErrors for whatever goes wrong with another rank."""
    try:
        yield
    except RuntimeError as error:
        raise NodeSick(f"{Sickness.RANK_LOST}: ranks cannot compute together: {error}") from None
