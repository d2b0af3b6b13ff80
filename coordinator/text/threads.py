"""Threads in which long texts are rendered and tokenised; those who ask take turns."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from pdserve.shared.errors import DeadlineExceeded, Overloaded
from pdserve.shared.fair_share import Turns

NUM_THREADS = 2
WAIT_S = 30.0  # for a turn
T = TypeVar("T")


class Asker(msgspec.Struct, frozen=True):
    """For whom a text is tokenised."""

    payer: str = ""  # whose turn it takes
    until_s: float = math.inf  # its deadline, of time.monotonic


class TextThreads:
    """The threads of one tokenizer. Used on one event loop."""

    def __init__(self, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")
        self._turns = Turns(NUM_THREADS)

    async def run(self, work: Callable[[], T], asker: Asker) -> T:
        """Do the work in a turn of the asker's.

        Raises DeadlineExceeded, or Overloaded when its turn does not come; and what `work` raises.
        """
        try:
            async with asyncio.timeout(max(0.0, asker.until_s - time.monotonic())):
                await self._turn(asker.payer)
                return await self._work(work)
        except TimeoutError:
            raise DeadlineExceeded(
                "the request's time-out passed before its text was tokenised"
            ) from None

    async def _turn(self, payer: str) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                await self._turns.take(payer)
        except TimeoutError:
            raise Overloaded(
                "too many long texts are waiting to be tokenised; try again later"
            ) from None

    async def _work(self, work: Callable[[], T]) -> T:
        """Do the work; the turn ends with it, even if the caller is gone before."""
        working = asyncio.get_running_loop().run_in_executor(self._threads, work)
        working.add_done_callback(self._over)
        return await asyncio.shield(working)

    def _over(self, working: asyncio.Future[T]) -> None:
        working.exception()  # seen, if its caller has gone
        self._turns.pass_on()
