"""Files: rows, and chunks of their bytes, which are written and read one at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from secrets import token_hex
from time import time

from coordinator.jobs.storage import tables
from coordinator.jobs.storage.database import Database, Row, Step
from coordinator.stateful.storage.shared.link import may_be_id
from pdserve.shared.errors import InvalidRequest, ItemNotFound

CHUNK_BYTES = 1 << 20
MAX_TENANT_ENTRIES = 10_000  # files and batches
_LOST_S = 2 * 3600  # chunks without a file are older than any upload takes


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a tenant's."""

    id: str
    name: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int


class Upload:
    """A file that is being written; nobody can read it before `done`."""

    def __init__(self, database: Database, owner: str, file_id: str) -> None:
        self.owner = owner
        self.file_id = file_id
        self.num_bytes = 0
        self._database = database
        self._num_chunks = 0
        self._rest = bytearray()

    @property
    def num_waiting(self) -> int:
        """Bytes that are to be written with further ones."""
        return len(self._rest)

    async def add(self, part: bytes) -> None:
        """Write more bytes. Raises StoreUnavailable."""
        self._rest += part
        self.num_bytes += len(part)
        while len(self._rest) >= CHUNK_BYTES:
            await self._put(bytes(self._rest[:CHUNK_BYTES]))
            del self._rest[:CHUNK_BYTES]

    async def last(self) -> None:
        """Write what is left."""
        if self._rest:
            await self._put(bytes(self._rest))
            self._rest.clear()

    async def drop(self) -> None:
        """Delete what was written."""
        # One more: it was being written when this was cancelled.
        await _drop_chunks(self._database, self.owner, self.file_id, self._num_chunks + 1)

    async def _put(self, chunk: bytes) -> None:
        step = (tables.PUT_CHUNK, self.file_id, self._num_chunks, int(time()), chunk)
        await self._database.run(step, owner=self.owner)
        self._num_chunks += 1


class Files:
    """The files of all tenants."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._arriving: Counter[str] = Counter()  # bytes of files that are not whole, by tenant
        self._left: dict[str, int] = {}  # room of these tenants, as it was last looked at
        self._left_in_all = 0

    def begin(self, owner: str) -> Upload:
        """Begin a file."""
        return Upload(self._database, owner, f"file-{token_hex(12)}")

    async def check_room(self, owner: str, num_bytes: int) -> tuple[int, int]:
        """Return the bytes that a tenant has left behind so many more, and all tenants have.

        Raises InvalidRequest: there is no room for these.
        """
        of_owner = owner, int(time()), owner
        (((own, entries, stored),),) = await self._database.run(
            (tables.STORED, *of_owner, *of_owner), owner=owner
        )
        most = self._database.max_bytes
        own += self._arriving[owner] + num_bytes
        stored += self._arriving.total() + num_bytes
        if own > most // 2 or entries >= MAX_TENANT_ENTRIES:
            raise InvalidRequest(
                f"{own} bytes would be stored, or arrive, in {entries} files and batches and this; "
                f"at most {most // 2} bytes and {MAX_TENANT_ENTRIES} of them are kept: delete some"
            )
        if stored > most:
            raise InvalidRequest(f"all tenants together have stored {stored} bytes of {most}")
        return most // 2 - own, most - stored

    async def arrive(self, owner: str, num_bytes: int) -> None:
        """Count bytes of a file as stored ones while it is written. Raises InvalidRequest."""
        if min(self._left.get(owner, 0), self._left_in_all) < num_bytes:
            self._left[owner], self._left_in_all = await self.check_room(owner, num_bytes)
        else:
            self._left[owner] -= num_bytes
            self._left_in_all -= num_bytes
        self._arriving[owner] += num_bytes

    def arrived(self, owner: str, num_bytes: int) -> None:
        """Count bytes that have arrived no longer: they are stored, or dropped."""
        self._arriving[owner] -= num_bytes
        if not self._arriving[owner]:
            del self._arriving[owner]
            self._left.pop(owner, None)

    async def done(self, upload: Upload, name: str, purpose: str, keep_s: int) -> None:
        """Have a file that is written completely. Raises InvalidRequest or StoreUnavailable."""
        await self.check_room(upload.owner, 0)  # its bytes are among those that arrive
        await upload.last()
        await self._database.run(put_file(upload, name, purpose, keep_s), owner=upload.owner)

    async def get(self, owner: str, file_id: str) -> StoredFile:
        """Return a file's row. Raises ItemNotFound."""
        rows: Sequence[Row] = ()
        if may_be_id(file_id):
            step = (tables.GET_FILE, owner, file_id, int(time()))
            (rows,) = await self._database.run(step, owner=owner)
        if not rows:
            raise ItemNotFound(f"there is no file {file_id[:128]!r}", "file_id")
        return StoredFile(*rows[0])

    async def page(
        self, owner: str, *, after: StoredFile | None, limit: int, newest_first: bool, purpose: str
    ) -> list[StoredFile]:
        """Return up to `limit` files behind one of them."""
        end = 1 << 62 if newest_first else -1
        at, last = (end, "") if after is None else (after.created_at, after.id)
        filters = "AND expires_at > ? AND purpose = ?" if purpose else "AND expires_at > ?"
        sql = tables.page("pdserve_files", newest_first=newest_first, filters=filters)
        given = [int(time()), purpose] if purpose else [int(time())]
        (rows,) = await self._database.run((sql, owner, *given, at, at, last, limit), owner=owner)
        return [StoredFile(*row) for row in rows]

    async def delete(self, owner: str, file_id: str) -> None:
        """Delete a file. Raises ItemNotFound."""
        rows: Sequence[Row] = ()
        if may_be_id(file_id):
            (rows,) = await self._database.run((tables.DROP_FILE, owner, file_id), owner=owner)
        if not rows:
            raise ItemNotFound(f"there is no file {file_id[:128]!r}", "file_id")
        num_chunks = -(-int(rows[0][0]) // CHUNK_BYTES)
        await asyncio.shield(_drop_chunks(self._database, owner, file_id, num_chunks))

    async def read(self, owner: str, file_id: str) -> AsyncIterator[bytes]:
        """Yield the bytes of a file, chunk by chunk."""
        number = 0
        while True:
            (rows,) = await self._database.run((tables.GET_CHUNK, file_id, number), owner=owner)
            if not rows:
                return
            yield bytes(rows[0][0])
            number += 1

    async def drop_old(self) -> None:
        """Delete files that have expired, and what is left of uploads that were cut off."""
        now = int(time())
        rows, lost = await self._database.run(
            (tables.OLD_FILES, now), (tables.LOST_CHUNKS, now - _LOST_S)
        )
        for owner, file_id in rows:
            with suppress(ItemNotFound):  # its owner, or another coordinator, was faster
                await self.delete(owner, file_id)
        for file_id, number in lost:
            await self._database.run((tables.DROP_CHUNK, file_id, number))


async def _drop_chunks(database: Database, owner: str, file_id: str, num_chunks: int) -> None:
    """Delete a file's bytes, chunk by chunk: a database is busy with many of them for seconds."""
    for number in range(num_chunks):
        await database.run((tables.DROP_CHUNK, file_id, number), owner=owner)


def put_file(upload: Upload, name: str, purpose: str, keep_s: int) -> Step:
    """Return the step that makes a file of an upload."""
    now = int(time())
    row = (upload.file_id, upload.owner, name, purpose, upload.num_bytes, now, now + keep_s)
    return (tables.PUT_FILE, *row)
