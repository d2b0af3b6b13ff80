"""Batches and their lines: rows, leases, and answers that are written once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from time import time
from typing import Literal

import msgspec
from msgspec import Struct, field

from coordinator.jobs.storage import tables
from coordinator.jobs.storage.database import Database, Row, Step
from coordinator.stateful.storage.shared.link import may_be_id
from pdserve.shared.errors import ItemNotFound, StoreUnavailable

Kind = Literal["batch", "messages"]  # OpenAI's or Anthropic's
Status = Literal[
    "arriving",  # nobody sees it, nor runs it
    "validating",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
]
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
PIECE = 256  # lines of a transaction: others' wait for its end
ARRIVE_S = 60.0  # for which more lines of a batch that arrives are waited for
MAX_RUNNING = 4  # batches of a tenant at a time; the others wait in the order of their creation


class LineState(IntEnum):
    """What became of a line."""

    LEFT = 0
    SUCCEEDED = 1
    ERRORED = 2
    CANCELED = 3
    EXPIRED = 4


class LineFault(Struct):
    """What is wrong with a line of an input file."""

    code: str
    message: str
    param: str | None
    line: int | None


class TokensUsed(Struct):
    """What the answers of a batch took, once it has ended."""

    input: int = 0
    cached: int = 0  # of these
    output: int = 0


class BatchDocument(Struct, kw_only=True):
    """What of a batch no statement looks at. Times are seconds since 1970."""

    endpoint: str
    input_file_id: str = ""
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    model: str | None = None  # that all lines name
    key_id: str = ""  # of the key under which its lines are charged
    output_keep_s: int = 30 * 86400
    total: int = 0
    counts: dict[int, int] = {}  # by state, once it has ended
    used: TokensUsed = field(default_factory=lambda: TokensUsed())
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    cancelling_at: int | None = None
    ended_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    faults: list[LineFault] = []


@dataclass(slots=True)
class Batch:
    """One batch of a tenant's."""

    id: str
    owner: str
    kind: Kind
    status: Status
    created_at: int
    deadline_at: int
    document: BatchDocument

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it will change any more."""
        return self.status in ENDED


@dataclass(frozen=True, slots=True)
class Line:
    """One line that has no answer yet."""

    number: int
    custom_id: str
    prefix: bytes  # by which lines that begin alike come together
    body: bytes  # JSON; b"": it is not read yet


@dataclass(frozen=True, slots=True)
class AnsweredLine:
    """One line that has its answer, or will have none."""

    number: int
    custom_id: str
    state: LineState
    answer: bytes  # JSON, as it stands in the output file; empty: it was canceled, or expired


class Batches:
    """The batches of all tenants."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # ---- for tenants ---------------------------------------------------------------------------

    async def add(self, batch: Batch, lines: Sequence[Line] = ()) -> None:
        """Have a new batch, which begins with these lines: with all of them, or it is not there.

        Raises StoreUnavailable.
        """
        status, batch.status = batch.status, "arriving" if lines else batch.status
        packed = msgspec.msgpack.encode(batch.document)
        row = (batch.id, batch.owner, batch.kind, batch.status)
        put: Step = (tables.PUT_BATCH, *row, batch.created_at, batch.deadline_at, packed)
        if not lines:
            await self._database.run((*put, 0.0), owner=batch.owner)
            return
        await self._database.run((*put, ARRIVE_S), owner=batch.owner)
        try:
            for first in range(0, len(lines), PIECE):
                put_lines = _put_lines(batch, lines[first : first + PIECE])
                await self._arrive(batch, (tables.ARRIVING, ARRIVE_S, batch.id), *put_lines)
            await self._arrive(batch, (tables.ARRIVES, status, batch.id))
        except BaseException:  # cancelled, too: who has asked for it does not know it
            await asyncio.shield(self._give_up(batch))
            raise
        batch.status = status

    async def get(self, owner: str, batch_id: str, kind: Kind) -> Batch:
        """Return a batch. Raises ItemNotFound."""
        rows: Sequence[Row] = ()
        if may_be_id(batch_id):
            step = (tables.GET_BATCH, owner, batch_id, kind)
            (rows,) = await self._database.run(step, owner=owner)
        if not rows:
            raise ItemNotFound(f"there is no batch {batch_id[:128]!r}", "batch_id")
        return _batch(rows[0])

    async def page(
        self, owner: str, kind: Kind, *, behind: Batch | None, limit: int, newest_first: bool = True
    ) -> list[Batch]:
        """Return up to `limit` batches behind one of them, the newest first, or the oldest."""
        end = 1 << 62 if newest_first else -1
        at, last = (end, "") if behind is None else (behind.created_at, behind.id)
        filters = f"AND kind = ? {tables.IS_WHOLE}"
        sql = tables.page("pdserve_batches", newest_first=newest_first, filters=filters)
        (rows,) = await self._database.run((sql, owner, kind, at, at, last, limit), owner=owner)
        return [_batch(row) for row in rows]

    async def cancel(self, batch: Batch) -> Batch | None:
        """Have a batch end early; None: it has ended, or is about to."""
        batch.document.cancelling_at = int(time())
        packed = msgspec.msgpack.encode(batch.document)
        step = (tables.CANCEL, packed, batch.owner, batch.id)
        (rows,) = await self._database.run(step, owner=batch.owner)
        return _batch(rows[0]) if rows else None

    async def delete(self, batch: Batch) -> None:
        """Delete a batch that has ended, with its lines; not its files."""
        await self._database.run((tables.DROP_BATCH, batch.owner, batch.id), owner=batch.owner)
        await self._drop_lines(batch.id, batch.owner)

    async def _arrive(self, batch: Batch, *steps: Step) -> None:
        rows, *_ = await self._database.run(*steps, is_guarded=True, owner=batch.owner)
        if not rows:
            raise StoreUnavailable(f"no lines were stored for {ARRIVE_S:g} s: try again later")

    async def _give_up(self, batch: Batch) -> None:
        with suppress(StoreUnavailable):  # then it is left as by a coordinator that was killed
            await self.delete(batch)

    async def counts(self, *batches: Batch) -> list[dict[int, int]]:
        """Return the number of lines in each state, of batches of one tenant's."""
        running = [batch for batch in batches if not batch.has_ended]
        found: Iterable[list[Row]] = ()
        if running:
            steps = [(tables.TALLY, batch.id) for batch in running]
            found = await self._database.run(*steps, owner=running[0].owner)
        tallies: dict[str, dict[int, int]] = {
            batch.id: dict(rows) for batch, rows in zip(running, found, strict=True)
        }
        for tally in tallies.values():  # of state 0 are all that have come to no other
            num_left = tally.pop(LineState.LEFT, 0) - sum(tally.values())
            tally |= {LineState.LEFT: num_left} if num_left else {}
        return [tallies.get(batch.id, batch.document.counts) for batch in batches]

    # ---- for their holder ----------------------------------------------------------------------

    async def claim(self, holder: str, lease_s: float) -> list[Batch]:
        """Renew the leases of a coordinator, claim what nobody holds, and return all that it has.

        Raises StoreUnavailable.
        """
        _, _, rows = await self._database.run(
            (tables.RENEW, lease_s, holder),
            (tables.CLAIM, holder, lease_s, MAX_RUNNING),
            (tables.HELD, holder),
        )
        return [_batch(row) for row in rows]

    async def release(self, holder: str | None) -> None:
        """Have others claim at once what a coordinator holds; None: what any has held."""
        await self._database.run(
            (tables.RELEASE_ALL,) if holder is None else (tables.RELEASE, holder)
        )

    async def go_on(self, batch: Batch, holder: str, *further: Step) -> bool:
        """Write a batch's new status, and run further steps; False: it is another's now, or it is
        to be cancelled.
        """
        packed = msgspec.msgpack.encode(batch.document)
        given = (batch.status, packed, batch.id, holder, batch.status)
        steps = ((tables.GO_ON, *given), *further)
        rows, *_ = await self._database.run(*steps, is_guarded=True, owner=batch.owner)
        return bool(rows)

    async def forget_lines(self, batch: Batch, holder: str) -> bool:
        """Delete the lines of a batch that is to be read again; False: it is another's now."""
        while True:
            rows, *dropped = await self._read(batch, holder, _drop_some(batch.id))
            if not rows:
                return False
            if not dropped[0]:
                break
        return bool((await self._read(batch, holder, (tables.DROP_TALLY, batch.id)))[0])

    async def add_lines(self, batch: Batch, holder: str, lines: Sequence[Line]) -> bool:
        """Add lines to a batch that is being read; False: it is another's now."""
        return bool((await self._read(batch, holder, *_put_lines(batch, lines)))[0])

    async def _read(self, batch: Batch, holder: str, *steps: Step) -> list[list[Row]]:
        reads: Step = (tables.READS, batch.id, holder)
        return await self._database.run(reads, *steps, is_guarded=True, owner=batch.owner)

    async def left(self, batch: Batch, behind: Line | None, limit: int) -> list[Line]:
        """Return lines without an answer, and without their bodies; those that begin alike stand
        together.
        """
        prefix, number = (b"", -1) if behind is None else (behind.prefix, behind.number)
        step = (tables.LEFT, batch.id, prefix, number, limit)
        (rows,) = await self._database.run(step, owner=batch.owner)
        return [Line(number, custom_id, bytes(begin), b"") for number, custom_id, begin in rows]

    async def body(self, batch: Batch, line: Line) -> bytes:
        """Return the request of a line that has no answer."""
        step = (tables.BODY, batch.id, line.number)
        (rows,) = await self._database.run(step, owner=batch.owner)
        return bytes(rows[0][0]) if rows else b""

    async def answer(self, batch: Batch, line: Line, state: LineState, answer: bytes) -> None:
        """Write a line's answer with its mark, unless it has one."""
        step = (tables.ANSWER, int(state), answer, b"", batch.id, line.number)
        counted = (tables.ADD_TO_TALLY, batch.id, int(state), 1, len(answer))
        await self._database.run(step, counted, is_guarded=True, owner=batch.owner)

    async def end_lines(self, batch: Batch, state: LineState) -> dict[int, int]:
        """Mark all lines that have no answer; return the number of lines in each state."""
        some = (tables.END_LINES, int(state), b"", batch.id, batch.id, PIECE)
        while (await self._database.run(some, owner=batch.owner))[0]:
            pass
        (rows,) = await self._database.run((tables.COUNTS, batch.id), owner=batch.owner)
        return {int(state): int(number) for state, number in rows}

    async def drop_lines(self, batch: Batch) -> None:
        """Delete the lines of a batch that has ended."""
        await self._drop_lines(batch.id, batch.owner)

    async def answered(self, batch: Batch, behind: int, limit: int) -> list[AnsweredLine]:
        """Return lines with answers behind the one of a number, in the order of their numbers."""
        step = (tables.ANSWERED, batch.id, behind, limit)
        (rows,) = await self._database.run(step, owner=batch.owner)
        return [AnsweredLine(n, i, LineState(state), bytes(told)) for n, i, state, told in rows]

    async def drop_old(self, before_s: int) -> None:
        """Delete batches of before a time, and what was left when coordinators were killed."""
        rows, _, left_over = await self._database.run(
            (tables.OLD_BATCHES, before_s), (tables.DROP_ARRIVING,), (tables.LEFT_OVER,)
        )
        for batch in map(_batch, rows):
            if batch.has_ended:
                await self.delete(batch)
        for (batch_id,) in left_over:
            await self._drop_lines(batch_id, "")

    async def _drop_lines(self, batch_id: str, owner: str) -> None:
        while (await self._database.run(_drop_some(batch_id), owner=owner))[0]:
            pass
        await self._database.run((tables.DROP_TALLY, batch_id), owner=owner)


def _put_lines(batch: Batch, lines: Sequence[Line]) -> list[Step]:
    steps: list[Step] = []
    for line in lines:
        row = (batch.id, line.number, line.custom_id, line.prefix, line.body, b"")
        steps.append((tables.PUT_LINE, *row))
    num_bytes = sum(len(line.body) for line in lines)
    return [*steps, (tables.ADD_TO_TALLY, batch.id, int(LineState.LEFT), len(lines), num_bytes)]


def _drop_some(batch_id: str) -> Step:
    return (tables.DROP_LINES, batch_id, batch_id, PIECE)


def _batch(row: Row) -> Batch:
    batch_id, owner, kind, status, created_at, deadline_at, packed = row
    document = msgspec.msgpack.decode(packed, type=BatchDocument)
    return Batch(batch_id, owner, kind, status, created_at, deadline_at, document)
