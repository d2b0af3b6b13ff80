"""Masks that are computed beside the steps, so that a step waits for none that may be slow.

They are computed in threads of lower priority than those of steps, few at a time, in turns of those
who pay for them. What a mask takes is its own CPU time, and an answer has a budget of it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from pdserve.engine.grammar.mask_jobs import LOOKS, MaskJob, MaskLimits
from pdserve.grammar import DeepThreads
from pdserve.grammar.budget import ANSWER_CPU_S
from pdserve.shared.errors import GrammarFailed

_NICE: Final = 10  # of the threads: a tenth of a core that a step wants as well
_NAME: Final = "grammar-ahead"


@dataclass(slots=True, eq=False)
class MaskAhead:
    """The mask for one place of an answer: `write` writes it, in a thread, and may fail."""

    payer: str
    num_tokens: int  # of the answer before it
    bits: npt.NDArray[np.int32]
    write: Callable[[], None]
    is_wanted: Callable[[], bool]  # whether its answer is still to go on
    spent_s: float = 0.0  # by the answer's masks before
    cpu_s: float = 0.0  # that it has taken
    failure: str = ""
    is_done: bool = False


class MaskQueue:
    """The masks that are computed, or wait. Used on one event loop.

    Attributes:
        wake: called when one is done.
    """

    def __init__(
        self, num_threads: int, limits: MaskLimits, answer_cpu_s: float = ANSWER_CPU_S
    ) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._num_threads = num_threads
        self._limits = limits
        self._answer_cpu_s = answer_cpu_s
        self._waiting: OrderedDict[str, deque[MaskAhead]] = OrderedDict()  # by payer
        self._running: dict[Future[None], tuple[MaskAhead, MaskJob]] = {}
        self._threads: DeepThreads | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, mask: MaskAhead) -> None:
        """Have a mask computed, unless its answer has used its budget up."""
        if mask.spent_s >= self._answer_cpu_s:
            mask.failure = f"its masks took {self._answer_cpu_s:g} s of CPU time"
            mask.is_done = True
            return
        self._waiting.setdefault(mask.payer, deque()).append(mask)
        self._go_on()

    def _go_on(self) -> None:
        """Begin what there is a thread for, by turns."""
        loop = asyncio.get_running_loop()
        while self._waiting and len(self._running) < self._num_threads:
            payer, masks = self._waiting.popitem(last=False)
            mask = masks.popleft()
            if masks:
                self._waiting[payer] = masks  # at the end
            if not mask.is_wanted():
                continue
            if self._threads is None:
                self._threads = DeepThreads(self._num_threads, _NAME)
            job = MaskJob(partial(_in_background, mask.write))
            future = self._threads.submit(job)
            self._running[future] = mask, job
            future.add_done_callback(partial(_tell, loop, self._ended))
        if self._running and self._timer is None:
            self._timer = loop.call_later(self._limits.cpu_s / LOOKS, self._look)

    def _ended(self, future: Future[None]) -> None:
        if future not in self._running:
            return  # it was given up
        mask, job = self._running.pop(future)
        error = future.exception()
        if isinstance(error, GrammarFailed):
            mask.failure = error.message
        elif error is not None:
            mask.failure = f"{type(error).__name__}: {error}"
        mask.cpu_s, mask.is_done = job.cpu_s, True
        self._go_on()
        self.wake()

    def _look(self) -> None:
        """Give up what takes too long: its thread ends by itself."""
        self._timer = None
        late = [f for f, (_, job) in self._running.items() if job.is_overdue(self._limits)]
        for future in late:
            mask, _ = self._running.pop(future)
            mask.failure = self._limits.said
            mask.is_done = True
        if late and self._threads is not None:
            self._threads.retire()  # what else is in its threads goes on
            self._threads = None
        self._go_on()
        if late:
            self.wake()


def _tell(
    loop: asyncio.AbstractEventLoop, ended: Callable[[Future[None]], None], future: Future[None]
) -> None:
    """Tell the loop of a job's end, in the job's thread; the loop may have ended before."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(ended, future)


def _in_background(write: Callable[[], None]) -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    write()
