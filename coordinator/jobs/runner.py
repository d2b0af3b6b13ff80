"""Holds batches for this coordinator, and runs them; and deletes what nobody keeps any more.

A coordinator holds a batch by a lease that it renews every `beat_s`. One that is killed or frozen
loses its batches to the others after `lease_s`, and leaves them alone from its next look on; what
it writes until then is written once all the same.
In a database of its own it finds nothing new by looking, and rests while it holds no batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from secrets import token_hex
from time import time

from coordinator.api.calls import Endpoint
from coordinator.api.context import ApiContext
from coordinator.jobs.batch_run import BatchRun
from coordinator.jobs.places import LinePlaces
from coordinator.jobs.storage.batches import Batch, Batches
from coordinator.jobs.storage.database import Database
from coordinator.jobs.storage.files import Files
from pdserve.protocol.status import ClusterStatus
from pdserve.shared.errors import StoreUnavailable

_log = logging.getLogger(__name__)

BEAT_S = 1.0
LEASE_S = 10.0
KEPT_S = 30 * 86400  # for which batches are listed
_CLEAN_BEATS = 60  # between two looks for what may be deleted


class BatchRunner:
    """The batches of one coordinator."""

    def __init__(
        self,
        database: Database,
        context: ApiContext,
        calls: Mapping[str, Endpoint],
        *,
        beat_s: float = BEAT_S,
        lease_s: float = LEASE_S,
    ) -> None:
        self.batches = Batches(database)
        self.files = Files(database)
        self.calls = calls
        self.places = LinePlaces()
        self.has_batches = False
        self._database = database
        self._context = context
        self._beat_s = beat_s
        self._lease_s = lease_s
        self._holder = token_hex(8)
        self._early = asyncio.Event()
        self._answered = asyncio.Event()  # with the next look at the database that succeeds
        self._runs: dict[str, BatchRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}  # of these, by batch
        self._living: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Begin to hold and run batches, on the running loop."""
        self._living = asyncio.create_task(self._live())

    def look_now(self) -> None:
        """Look before it is time to: there is something to run, or to cancel."""
        self._early.set()

    async def close(self) -> None:
        """Leave everything to whoever comes next, and close the database."""
        tasks = [task for task in (self._living, *self._tasks.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._living is not None:
            try:
                await self.batches.release(self._holder)
            except StoreUnavailable as error:
                _log.warning("%s; others wait until our leases end", error)
        await self._database.close()

    async def _live(self) -> None:
        is_lost, is_new = False, not self._database.is_shared
        loop, clean_s, every_s = asyncio.get_running_loop(), 0.0, _CLEAN_BEATS * self._beat_s
        while not self._context.tasks.is_draining:
            self._early.clear()
            try:
                if is_new:  # whoever held them is not there any more: the file is ours alone
                    await self.batches.release(None)
                await self._beat()
                if loop.time() >= clean_s:
                    clean_s = loop.time() + every_s
                    await self.files.drop_old()
                    await self.batches.drop_old(int(time()) - KEPT_S)
                is_lost = is_new = False
                self._tell_answered()
            except StoreUnavailable as error:
                if not is_lost:
                    _log.error("batches are not there: %s", error.__cause__ or error)
                is_lost = True
            except Exception:  # noqa: BLE001 - whatever it is, other batches go on
                if not is_lost:
                    _log.exception("batches are not looked after until this is over")
                is_lost = True
            rests = not (self._database.is_shared or self.has_batches or is_lost)
            try:
                async with asyncio.timeout(every_s if rests else self._beat_s):
                    await self._early.wait()
            except TimeoutError:
                continue
        self._tell_answered()  # nobody looks any more: who waits for it tries once

    def _tell_answered(self) -> None:
        self._answered.set()
        self._answered = asyncio.Event()

    async def _beat(self) -> None:
        held = await self.batches.claim(self._holder, self._lease_s)
        self.has_batches = bool(held)
        owners = frozenset(batch.owner for batch in held)
        if held:
            models = self._context.models
            num_nodes = _num_ready(models.status())
            self.places.resize(num_nodes, models.default.generator.max_inflight, owners)
        for batch_id in self._tasks.keys() - {batch.id for batch in held}:
            # Another's by now, or just over. Both would begin what is left, and take calls from
            # each other, which are the same.
            if not self._tasks[batch_id].cancelling():
                self._tasks[batch_id].cancel()
        for batch in held:
            run = self._runs.get(batch.id)
            if run is None:
                self._start(batch)
            elif batch.status == "cancelling":
                run.batch.status, run.batch.document.cancelling_at = (
                    "cancelling",
                    batch.document.cancelling_at,
                )
                run.stop()

    def _start(self, batch: Batch) -> None:
        run = BatchRun(
            batch,
            self._holder,
            self._context,
            self.calls,
            self.batches,
            self.files,
            self.places,
            lambda: self._answered.wait(),  # of the event that is there by then
        )
        self._runs[batch.id] = run
        self._tasks[batch.id] = task = asyncio.create_task(run.run())
        task.add_done_callback(lambda task: self._over(batch.id, task))

    def _over(self, batch_id: str, task: asyncio.Task[None]) -> None:
        del self._runs[batch_id], self._tasks[batch_id]
        error = None if task.cancelled() else task.exception()
        if isinstance(error, StoreUnavailable):
            _log.warning("batch %s is gone on with later: %s", batch_id, error)
        elif error is not None:
            _log.error("batch %s stopped, and is gone on with later", batch_id, exc_info=error)


def _num_ready(status: ClusterStatus) -> int:
    return sum(node.state == "ready" for node in status.nodes)
