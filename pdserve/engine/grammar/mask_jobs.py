"""Masks that are being computed in threads, and what each of them has taken so far.

The limit is on a mask's own CPU time, from its own beginning. So one that takes long is told from
one that waits behind others, or for a core of a busy machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Final

from pdserve.grammar.budget import MASK_CPU_S

MASK_S: Final = 2.0  # on the clock, for one that gets no CPU time
LOOKS: Final = 4  # per limit


@dataclass(frozen=True, slots=True)
class MaskLimits:
    """How long the computation of one mask may take."""

    cpu_s: float = MASK_CPU_S
    wall_s: float = MASK_S

    @property
    def said(self) -> str:
        """What is said of a mask that took longer."""
        return f"no mask within {self.cpu_s:g} s of CPU time, {self.wall_s:g} s in all"


class MaskJob:
    """The computation of one mask: call it in a thread, once."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._began: tuple[int, float, float] | None = None  # CPU clock, its time, the time
        self.cpu_s = 0.0  # that it took, once it is done

    def __call__(self) -> None:
        """Compute it."""
        clock = time.pthread_getcpuclockid(threading.get_ident())
        self._began = clock, time.clock_gettime(clock), time.monotonic()
        try:
            self._work()
        finally:
            self.cpu_s = time.clock_gettime(clock) - self._began[1]

    def is_overdue(self, limits: MaskLimits) -> bool:
        """Whether it has taken too long already."""
        if self._began is None:
            return False
        clock, began_cpu_s, began_s = self._began
        try:
            is_slow = time.clock_gettime(clock) - began_cpu_s >= limits.cpu_s
        except OSError:  # its thread has ended, so it is done
            return False
        return is_slow or time.monotonic() - began_s >= limits.wall_s


def wait_for_masks(
    jobs: Mapping[Future[None], MaskJob], limits: MaskLimits, abandon: Callable[[], None]
) -> set[Future[None]]:
    """Wait until every job is done, cancelled or overdue; return those that are overdue.

    `abandon` is called when some are overdue: it cancels the jobs that have not begun.
    """
    overdue: set[Future[None]] = set()
    pending = set(jobs)
    while pending:
        _, pending = wait(pending, timeout=min(limits.cpu_s, limits.wall_s) / LOOKS)
        if late := {future for future in pending if jobs[future].is_overdue(limits)}:
            overdue |= late
            abandon()
            pending = {f for f in pending - late if not f.cancelled()}
    return overdue
