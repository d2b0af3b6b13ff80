"""A place's share of its node's memory.

    budget = weights of the places that are awake + KV that each holds, or its floor if that is more

A place takes memory for blocks as requests need it (`SharedPool`), and gives back what no request
uses when others lack it. Its floor, room for one request of the longest, is nobody else's, so each
place gets on by itself. While one lacks memory, none takes more than an equal share above that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from threading import Thread
from typing import Final

from kv_transfer.memory import ExportedPool
from pdserve._native import Ledger
from pdserve.engine.kv.shared_pool import SharedPool
from pdserve.shared.errors import ConfigError
from pdserve.shared.process.may_pass import NotNow

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0  # without news, a place looks whether another one has died
ENTER_S: Final = 30.0  # for which it waits to be awake, until others have given memory back
_PIECE_BYTES: Final = 64 << 20  # given back in one go, which takes some milliseconds
_MIB: Final = 1 << 20
_HUGE: Final = 2 << 20  # bytes of a page


class PlaceMemory:
    """Memory for the blocks of one life's pool: a `Budget`. Belongs to the event loop."""

    def __init__(self, ledger: Ledger, memory: ExportedPool) -> None:
        """Nothing is held yet."""
        self.is_kept_out = False  # what others use for requests is in the way of `enter`
        self._ledger = ledger
        self._memory = memory
        self._block_bytes = memory.block_bytes
        self._wanted = 0  # bytes
        self._pool: SharedPool | None = None
        self._watch: _Watch | None = None
        self._committing: asyncio.Task[None] | None = None  # the last one, which waits for others

    # ---- Budget --------------------------------------------------------------------------------

    @property
    def num_within_reach(self) -> int:
        """As Budget.num_within_reach."""
        return self._ledger.reach // self._block_bytes

    def take(self, num_blocks: int) -> bool:
        """As Budget.take."""
        return self._ledger.take(num_blocks * self._block_bytes)

    def took(self, block_ids: Sequence[int]) -> None:
        """As Budget.took: they have huge pages, where the kernel makes some, as other nodes have.

        Not in this thread, since it takes a millisecond for each. They may be in use meanwhile.
        """
        runs = [run for run in _runs(block_ids) if (run[1] - run[0]) * self._block_bytes >= _HUGE]
        if runs:
            self._committing = asyncio.get_running_loop().create_task(
                self._commit(runs, self._committing)
            )

    def want(self, num_blocks: int) -> None:
        """As Budget.want."""
        wanted = num_blocks * self._block_bytes
        if wanted != self._wanted:
            self._wanted = wanted
            self._ledger.set_wanted(wanted)

    def use(self, num_blocks: int) -> None:
        """As Budget.use."""
        self._ledger.set_used(num_blocks * self._block_bytes)

    async def _commit(
        self, runs: Sequence[tuple[int, int]], former: asyncio.Task[None] | None
    ) -> None:
        if former is not None:
            await former
        for first, end in runs:
            try:
                await asyncio.to_thread(self._memory.commit_within, first, end)
            except OSError as error:
                log.warning("no huge pages for blocks %d to %d: %s", first, end - 1, error)
        if asyncio.current_task() is self._committing:
            self._committing = None
            self.look()  # what was owed meanwhile was kept

    # ---- a life --------------------------------------------------------------------------------

    async def enter(self, weights: int, floor: int, check_wanted: Callable[[], None]) -> None:
        """Be awake, as soon as others have given back what that takes.

        Args:
            weights: bytes that are mapped while it is.
            floor: bytes of KV that are its own.
            check_wanted: raises if the life is over before it has begun.

        Raises:
            ConfigError: it does not fit beside the others.
            NotNow: they have not in time.
        """
        ledger, loop = self._ledger, asyncio.get_running_loop()
        begin_s = loop.time()
        try:
            while True:
                seen = ledger.changes
                if ledger.enter(weights, floor):
                    return
                check_wanted()
                ledger.set_wanted(weights + floor)
                waited_s = loop.time() - begin_s
                self.is_kept_out = waited_s >= LOOK_S
                if waited_s >= ENTER_S or weights + floor > ledger.budget:
                    raise _no_room(ledger, weights, floor)
                if not ledger.clear_dead():
                    await asyncio.to_thread(ledger.await_change, seen, LOOK_S)
        finally:
            ledger.set_wanted(0)
            self.is_kept_out = False

    def begin(self, pool: SharedPool) -> None:
        """Give back what others lack, and hear when they do, until `end`."""
        self._pool = pool
        pool.on_release(self._released)
        loop = asyncio.get_running_loop()
        self._watch = _Watch(
            self._ledger, lambda is_news: loop.call_soon_threadsafe(self._heard, is_news)
        )

    def free(self) -> None:
        """Give all memory back to the system that nobody has asked the ledger for."""
        self._memory.free_blocks(0, self._memory.num_blocks)

    async def end(self) -> None:
        """Stop looking. The pool is not used any more."""
        self._pool = None
        if self._committing is not None:
            await self._committing
        if self._watch is not None:
            self._watch.stop()

    def look(self) -> None:
        """Look what others lack, and whether there is what this place lacks."""
        pool = self._pool
        if pool is None:
            return
        ledger, size = self._ledger, self._block_bytes
        ledger.clear_dead()
        # A block that is just being committed would have memory again after it was freed.
        if self._committing is None and (owed := ledger.owed):
            most = max(1, _PIECE_BYTES // size)
            given = pool.give_back(min(-(-owed // size), most))
            for first, end in _runs(given):
                self._memory.free_blocks(first, end)
            if given:  # else everybody would look again for nothing, and so on
                ledger.give(len(given) * size)
            if len(given) == most:
                asyncio.get_running_loop().call_soon(self.look)
        if self._wanted and ledger.room >= size:
            pool.tell_room()

    def _released(self) -> None:
        if self._ledger.owed:
            self.look()

    def _heard(self, is_news: bool) -> None:
        self.look()
        if not is_news and self._wanted and self._pool is not None:
            self.want(0)  # who still lacks it asks again, as it plans
            self._pool.tell_room()


def _no_room(ledger: Ledger, weights: int, floor: int) -> ConfigError:
    asked = (
        f"weights of {weights // _MIB} MiB, and {floor // _MIB} MiB for a request of the longest, "
        f"do not fit into the {ledger.budget // _MIB} MiB of this node beside"
    )
    if ledger.fits(weights, floor):
        return NotNow(
            f"{asked} what requests for its other models used for {ENTER_S:g} s: raise "
            "shared.memory, if that is often so"
        )
    return ConfigError(
        f"{asked} its other models: raise shared.memory, or lower at_once or max_model_len"
    )


class _Watch:
    """A thread that waits for changes in a ledger."""

    def __init__(self, ledger: Ledger, tell: Callable[[bool], object]) -> None:
        self._ledger = ledger
        self._tell = tell
        self._is_stopping = False
        self._thread = Thread(target=self._run, name="pdserve-place", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it."""
        self._is_stopping = True
        self._ledger.set_wanted(1)  # a change, which wakes it
        self._ledger.set_wanted(0)
        self._thread.join()

    def _run(self) -> None:
        seen = self._ledger.changes
        while not self._is_stopping:
            before, seen = seen, self._ledger.await_change(seen, LOOK_S)
            if not self._is_stopping:
                self._tell(seen != before)


def _runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of blocks that follow each other."""
    begin = end = -1
    for block_id in sorted(block_ids):
        if block_id != end:
            if end > begin:
                yield begin, end
            begin = block_id
        end = block_id + 1
    if end > begin:
        yield begin, end
