"""The other ranks of a node, as rank 0 sees them: started, watched and killed."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdserve import _native
from pdserve.engine.ranks.process import MAPPED
from pdserve.engine.ranks.sizes import memory_bytes
from pdserve.protocol import Sickness
from pdserve.shared.errors import NodeSick
from pdserve.shared.process.shared_memory import sealed_memory

MAPPED_S = 300.0  # to start Python and map memory, whatever else the machine does


class RankProcess(Protocol):
    """What is asked of a rank's subprocess.Popen."""

    pid: int
    stdout: int  # what it writes MAPPED to; whoever reads it closes it
    sentinel: int  # can be read, or is at its end, once the process has ended

    def kill(self) -> None:
        """Nothing if it has ended."""
        ...

    def wait(self) -> int:
        """Its exit code, or the negative signal that ended it. Closes the sentinel: once only."""
        ...


class PythonRank:
    """A rank in a Python of its own: `python -m MODULE ORDER`, the order as JSON."""

    def __init__(self, module: str, order: msgspec.Struct, fds: Sequence[int]) -> None:
        """`fds` are inherited, under the same numbers."""
        words = ["-m", module, msgspec.json.encode(order).decode()]
        read, write = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.DEVNULL,
                stdout=write,
                pass_fds=fds,
            )
        finally:
            os.close(write)
        self.pid, self.stdout = self._process.pid, read
        self.sentinel = os.pidfd_open(self.pid)

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        self._process.kill()

    def wait(self) -> int:
        """Its exit code, or the negative signal that ended it."""
        code = self._process.wait()
        os.close(self.sentinel)
        return code


Start = Callable[[int, int], RankProcess]


class RankProcesses:
    """The other ranks, from their start to their end. A thread watches them."""

    def __init__(self, stages: tuple[int, ...], start: Start) -> None:
        """Start them. The thread that calls this must live as long as they do: they end with it.

        Args:
            stages: the number of ranks of each, on this host; this process is rank 0.
            start: (rank, descriptor of the memory) |-> the process.
        """
        self.stages = stages
        num_bytes = memory_bytes(stages)
        self.memory: NDArray[np.uint8]
        fd, self.memory = sealed_memory("pdserve-ranks", num_bytes)
        try:
            self._group = _native.RankGroup(self.memory, 0, stages)
            others = range(1, sum(stages))
            self._processes = [start(rank, fd) for rank in others]
        finally:
            os.close(fd)
        self._lost = ""
        self._is_closing = False
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    @property
    def lost(self) -> str:
        """Which rank has ended, and how; empty: none has."""
        return self._lost

    @property
    def pids(self) -> list[int]:
        """Process ids of ranks 1 and up."""
        return [process.pid for process in self._processes]

    def wait_mapped(self) -> None:
        """Wait until all of them have mapped the pool, which may be sealed then.

        Raises:
            NodeSick: one has ended, or takes too long.
        """
        end_s = time.monotonic() + MAPPED_S
        for rank, process in enumerate(self._processes, start=1):
            with open(process.stdout, "rb", buffering=0) as output:
                left_s = max(0.0, end_s - time.monotonic())
                poll = select.poll()  # select has no room for high descriptors
                poll.register(output, select.POLLIN)
                if not poll.poll(left_s * 1000) or output.read(1) != MAPPED:
                    raise _lost(self._lost or f"rank {rank} has not started")

    def close(self) -> None:
        """Kill them, and wait for their end."""
        self._is_closing = True
        self._group.give_up()
        for process in self._processes:
            process.kill()
        self._watcher.join()

    def _watch(self) -> None:
        """Wait for the end of each; the first one ends them all."""
        fds = {process.sentinel: process for process in self._processes}
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        while fds:
            for fd, _ in poll.poll():
                poll.unregister(fd)
                process = fds.pop(fd)
                self._ended(process, process.wait())

    def _ended(self, process: RankProcess, code: int) -> None:
        if self._is_closing or self._lost:
            return
        rank = self._processes.index(process) + 1
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        self._lost = f"rank {rank} of {sum(self.stages)} (process {process.pid}) {how}"
        self._group.give_up()


def wait_ready(
    group: _native.RankGroup, on_wait: Callable[[], None], ranks: RankProcesses | None = None
) -> None:
    """Wait until all ranks have loaded their weights.

    Args:
        group: rank 0's.
        on_wait: called now and then; may raise.
        ranks: say who is lost.

    Raises:
        NodeSick: one has ended.
    """
    try:
        while not group.wait_ready(0.1):
            on_wait()
    except _native.RanksLost as error:
        raise _lost((ranks.lost if ranks else "") or str(error)) from error


def _lost(how: str) -> NodeSick:
    return NodeSick(f"{Sickness.RANK_LOST}: {how}")
