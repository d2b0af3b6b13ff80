"""One batch from its first line to its files, at the coordinator that holds it.

    validating ─► in_progress ─► finalizing ─► completed
        └► failed      └─ cancelling, or late ─► cancelled, expired

Whatever was done before is in the database. So a coordinator that claims a batch goes on wherever
another has left it: it reads the file again, runs lines without an answer, or writes files anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from time import time

from coordinator.api.calls import Endpoint
from coordinator.api.context import ApiContext
from coordinator.jobs.line_run import run_line
from coordinator.jobs.lines import LineReader
from coordinator.jobs.output import add_used, answered, shown
from coordinator.jobs.places import LinePlace, LinePlaces
from coordinator.jobs.storage.batches import (
    Batch,
    Batches,
    Line,
    LineFault,
    LineState,
    Status,
    TokensUsed,
)
from coordinator.jobs.storage.database import Step
from coordinator.jobs.storage.files import Files, Upload, put_file
from pdserve.shared.errors import InvalidRequest, ItemNotFound, StoreUnavailable

_log = logging.getLogger(__name__)
_AHEAD = 64  # lines that are read at a time, without their bodies
_WRITTEN = 8  # answers that are read at a time


class BatchRun:
    """A run of one batch.

    Args:
        holder: this coordinator, as the database knows it.
        store_answers: waits until the store has answered again, or this coordinator drains.
    """

    def __init__(
        self,
        batch: Batch,
        holder: str,
        context: ApiContext,
        calls: Mapping[str, Endpoint],
        batches: Batches,
        files: Files,
        places: LinePlaces,
        store_answers: Callable[[], Awaitable[object]],
    ) -> None:
        self.batch = batch
        self._holder = holder
        self._context = context
        self._calls = calls
        self._batches = batches
        self._files = files
        self._places = places
        self._store_answers = store_answers
        self._stopped = asyncio.Event()  # no further line is begun, and those that run are ended
        self._lines: set[asyncio.Task[None]] = set()

    def stop(self) -> None:
        """Have it end early: it is to be cancelled."""
        self._stopped.set()

    async def run(self) -> None:
        """Bring the batch to its end, unless this coordinator is to end before.

        Raises StoreUnavailable: it goes on with the next look at what there is to do.
        """
        batch = self.batch
        if batch.status == "validating" and not await self._validate():
            return
        if batch.status == "cancelling":
            self.stop()
        if batch.status in ("in_progress", "cancelling"):
            await self._run_lines()
            if self._context.tasks.is_draining and not self._is_over:
                return
        await self._finalize()

    # ---- reading the file ----------------------------------------------------------------------

    async def _validate(self) -> bool:
        """Read the lines; returns whether there is anything to run."""
        batch = self.batch
        config = self._context.config
        reader = LineReader(batch.document.endpoint, config.max_body_bytes)
        file_id = batch.document.input_file_id
        if not await self._batches.forget_lines(batch, self._holder):
            return False
        try:
            file = await self._files.get(batch.owner, file_id)
            await self._files.check_room(batch.owner, file.num_bytes)  # its lines are stored, too
            async for lines in reader.read(self._files.read(batch.owner, file_id)):
                if not await self._batches.add_lines(batch, self._holder, lines):
                    return False
            await self._files.get(batch.owner, file_id)  # else it was not read to its end
        except ItemNotFound as error:
            reader.faults.append(LineFault("file_not_found", error.message, None, None))
        except InvalidRequest as error:
            reader.faults.append(LineFault("no_room", error.message, None, None))
        now = int(time())
        if reader.faults:
            batch.document.faults, batch.document.ended_at = reader.faults, now
            if await self._go_on("failed"):
                await self._batches.drop_lines(batch)
            return False
        batch.document.total, batch.document.in_progress_at = reader.num_lines, now
        if len(reader.models) == 1:
            (batch.document.model,) = reader.models
        return await self._go_on("in_progress")

    # ---- running lines -------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        return self._stopped.is_set() or time() >= self.batch.deadline_at

    async def _run_lines(self) -> None:
        stopping = asyncio.create_task(self._until_stopped())
        beginning = asyncio.create_task(self._begin_lines())
        try:
            await asyncio.wait({stopping, beginning}, return_when=asyncio.FIRST_COMPLETED)
            if beginning.done():
                beginning.result()
        finally:
            for task in (stopping, beginning, *self._lines):
                task.cancel()
            await asyncio.gather(stopping, beginning, *self._lines, return_exceptions=True)

    async def _until_stopped(self) -> None:
        left_s = max(0.0, self.batch.deadline_at - time())
        try:
            async with asyncio.timeout(left_s):
                await self._stopped.wait()
        except TimeoutError:
            return  # it has expired

    async def _begin_lines(self) -> None:
        """Begin every line that is left, and wait for all of them; none while draining."""
        behind: Line | None = None
        while lines := await self._batches.left(self.batch, behind, _AHEAD):
            for line in lines:
                place = await self._places.take(self.batch.owner)
                if self._context.tasks.is_draining:
                    place.leave()
                    break
                task = asyncio.create_task(self._answer(line, place))
                self._lines.add(task)
                task.add_done_callback(partial(self._ended, place))
            else:
                behind = lines[-1]
                continue
            break
        while self._lines:
            await asyncio.wait(self._lines)

    def _ended(self, place: LinePlace, task: asyncio.Task[None]) -> None:
        self._lines.discard(task)
        place.leave()  # not only in the task: if it is cancelled before it begins, it never runs

    async def _answer(self, line: Line, place: LinePlace) -> None:
        batch = self.batch
        endpoint = self._calls[batch.document.endpoint]
        try:
            read = partial(self._batches.body, batch, line)
            answer = await run_line(batch, line, read, endpoint, self._context, place.begun)
        finally:
            place.leave()
        state, text = answered(batch, line, answer)
        while True:
            try:
                return await self._batches.answer(batch, line, state, text)
            except StoreUnavailable:
                await self._store_answers()

    # ---- writing the files ---------------------------------------------------------------------

    async def _finalize(self) -> None:
        batch, document = self.batch, self.batch.document
        is_cancelled = batch.status == "cancelling"
        if not self._is_over and await self._batches.left(batch, None, 1):
            _log.error("lines of batch %s have no answer", batch.id)
            return
        undone = LineState.CANCELED if is_cancelled else LineState.EXPIRED
        document.used = TokensUsed()
        document.counts = counts = await self._batches.end_lines(batch, undone)
        document.total = sum(counts.values())
        if not is_cancelled:
            document.finalizing_at = int(time())
            is_cancelled = not await self._go_on("finalizing")
        steps = await self._write_files()
        document.ended_at = int(time())
        end: Status = "expired" if counts.get(LineState.EXPIRED) else "completed"
        batch.status = "cancelled" if is_cancelled else end
        if not await self._batches.go_on(batch, self._holder, *steps):
            _log.info("batch %s is another coordinator's now", batch.id)
            return
        await self._batches.drop_lines(batch)

    async def _write_files(self) -> list[Step]:
        """Write what each line came to; return the steps that make files of it."""
        batch, document = self.batch, self.batch.document
        is_one = batch.kind == "messages"
        output = self._files.begin(batch.owner)
        errors = output if is_one else self._files.begin(batch.owner)
        behind = -1
        while lines := await self._batches.answered(batch, behind, _WRITTEN):
            for line in lines:
                upload = output if line.state is LineState.SUCCEEDED else errors
                await upload.add(shown(batch, line) + b"\n")
                add_used(document.used, line)
            behind = lines[-1].number
        steps: list[Step] = []
        if output.num_bytes:
            document.output_file_id = output.file_id
            steps.append(await self._file(output, "output"))
        if errors.num_bytes and not is_one:
            document.error_file_id = errors.file_id
            steps.append(await self._file(errors, "error"))
        return steps

    async def _file(self, upload: Upload, what: str) -> Step:
        await upload.last()
        name, keep_s = f"{self.batch.id}_{what}.jsonl", self.batch.document.output_keep_s
        return put_file(upload, name, "batch_output", keep_s)

    async def _go_on(self, status: Status, *further: Step) -> bool:
        """Write the next status; returns False if the batch is to be cancelled instead."""
        before, self.batch.status = self.batch.status, status
        if await self._batches.go_on(self.batch, self._holder, *further):
            return True
        self.batch.status = "cancelling"
        _log.debug("batch %s is not %s any more", self.batch.id, before)
        return False
