"""Computes the steps that the host before sends, as rank 0 of this host: it stands for that one."""

from __future__ import annotations

import numpy as np

from kv_transfer.memory import ExportedPool
from pdserve import _native
from pdserve.engine.ranks.processes import RankProcesses
from pdserve.engine.ranks.step_memory import StepMemory
from pdserve.kv import KvLayout
from pdserve.node.rank_hosts.lacking import Ids
from pdserve.node.rank_hosts.messages import HostAnswer, HostStep
from pdserve.node.rank_hosts.pool_view import PoolView
from pdserve.node.rank_hosts.step_arrays import HostStepArrays
from pdserve.node.rank_hosts.stream import HostStream
from pdserve.shared.errors import PeerLost

_LOOK_S = 0.1  # how often it looks whether a rank of this host is lost, while no step comes


class StandIn:
    """The host before, among the ranks of this one."""

    def __init__(
        self,
        stream: HostStream,
        processes: RankProcesses,
        pool: ExportedPool,
        layout: KvLayout,
        sizes: tuple[int, int],
        first_layer: int,
    ) -> None:
        """Compute for the other end of `stream`, in this pool, whose layout it is.

        `sizes` and `first_layer` are as of HostStepArrays.
        """
        self._stream = stream
        self._processes = processes
        self._steps = StepMemory(processes.memory, 0, processes.stages)
        self._pool = pool
        self._layout = layout
        self._view = PoolView(pool.data, layout)
        self._sizes = sizes
        self._first_layer = first_layer

    def run(self) -> None:
        """Compute steps until the host before has ended.

        Raises:
            PeerLost: it has.
            RanksLost: a rank of this host has.
        """
        group, stream = self._steps.group, self._stream
        while True:
            while stream.is_silent(_LOOK_S):
                if self._processes.lost:
                    raise _native.RanksLost(self._processes.lost)
            self._receive(stream.receive(HostStep))
            step = HostStepArrays.of(
                self._steps, self._sizes, self._layout.block_size, self._first_layer
            )
            group.begin_step()
            for rows in step.parts(self._sizes[0]):
                stream.receive_array(rows)
                group.give(rows)
            group.end_step()
            tokens = self._view.tokens(*step.slots)
            stream.send(HostAnswer(), tokens, *step.results, step.tapped())

    def _receive(self, head: HostStep) -> None:
        """Receive the step's memory, and the blocks that this host lacks."""
        if not 0 <= head.num_blocks <= self._pool.num_blocks:
            raise PeerLost(f"a step that needs {head.num_blocks} blocks")
        self._stream.receive_array(self._steps.step_to_be(head.num_bytes).numpy())
        lacking: Ids = np.empty(head.num_blocks, np.int64)
        self._stream.receive_array(lacking)
        self._pool.bump(lacking.tolist())  # so the host after this one lacks them, too
        for ids in self._view.few_at_once(lacking):
            blocks = self._view.empty_blocks(len(ids))
            self._stream.receive_array(blocks)
            self._view.set_blocks(ids, blocks)
