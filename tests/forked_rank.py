"""Ranks that are forked from rank 0: to start Python and import torch takes each a few seconds."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from pdserve.engine.ranks.order import RankOrder
from pdserve.process.parent_death import die_with_parent


class ForkedRank:
    """Implements pdserve.engine.ranks.processes.RankProcess."""

    def __init__(self, run: Callable[[int], None]) -> None:
        """`run` is a rank's life; it is given the descriptor to write MAPPED to."""
        parent = os.getpid()
        self.stdout, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                die_with_parent(parent)
                run(write)
            finally:
                os._exit(1)
        os.close(write)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def fork_ranks() -> None:
    """From now on this process forks the ranks of its host, and the one that stands for the next.

    For nodes, and further hosts of nodes, that are forked themselves.
    """
    from pdserve.engine.ranks.process import run_rank
    from pdserve.node.rank_hosts.carrier import run_carrier
    from pdserve.node.rank_hosts.messages import CarrierOrder
    from pdserve.node.start import ranks

    def forked(module: str, order: RankOrder | CarrierOrder, fds: Sequence[int]) -> ForkedRank:
        is_carrier = isinstance(order, CarrierOrder)
        return ForkedRank(partial(run_carrier if is_carrier else run_rank, order))

    ranks.PythonRank = forked
