"""/v1/files: upload, list, read and delete. Bytes are passed on as they come, and never held."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from coordinator.api.answer.bodies import json_answer
from coordinator.api.calls import question
from coordinator.api.context import CONTEXT, TRACE
from coordinator.api.read.ask import Question
from coordinator.api.read.body_budget import SLOW
from coordinator.api.server import callers
from coordinator.api.server.middleware import check_socket_origin
from coordinator.jobs.keys import RUNNER
from coordinator.jobs.objects import (
    MAX_KEPT_S,
    MIN_KEPT_S,
    DeletedFile,
    FileList,
    file_shown,
)
from coordinator.jobs.runner import BatchRunner
from coordinator.jobs.storage.files import CHUNK_BYTES, StoredFile, Upload
from coordinator.stateful.pages import whole_number
from pdserve.shared.errors import BuffersFull, InvalidRequest, ItemNotFound

T = TypeVar("T")

MAX_FILE_BYTES = 200 * 2**20
MAX_LISTED = 10_000
_UPLOAD_S = 3600.0  # for a whole upload
_MAX_FIELD_BYTES = 256
_MAX_FORM_BYTES = 2**20  # besides the file
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_MULTIPART = "multipart/form-data"


async def upload_file(request: web.Request) -> web.Response:
    """POST /v1/files: store the lines of a batch to come."""
    context, trace, runner = request.app[CONTEXT], request[TRACE], request.app[RUNNER]
    check_socket_origin(request, context.config.cors_origins)  # browsers send forms unasked
    callers.begin(context, trace)
    if request.content_type != _MULTIPART:
        raise web.HTTPUnsupportedMediaType(text=f"the request body must be {_MULTIPART}")
    size = request.content_length
    if size is not None and size > MAX_FILE_BYTES + _MAX_FORM_BYTES:  # before it is sent
        raise web.HTTPRequestEntityTooLarge(MAX_FILE_BYTES, size)
    await runner.files.check_room(trace.owner, 0)
    upload = runner.files.begin(trace.owner)
    try:
        fields = await _receive(request, upload)
        keep_s, name = _keep_s(fields), fields["file"]
        if fields.get("purpose") != "batch":
            raise InvalidRequest(
                f"'purpose' is {fields.get('purpose', '')[:64]!r}, but this server keeps files for "
                "'batch' only",
                "purpose",
            )
        await runner.files.done(upload, name, "batch", keep_s)
    except BaseException:  # cancelled, too: the client is gone, and half a file is of no use
        await asyncio.shield(upload.drop())
        raise
    finally:
        runner.files.arrived(trace.owner, upload.num_bytes)
    return json_answer(file_shown(await runner.files.get(trace.owner, upload.file_id)))


async def _receive(request: web.Request, upload: Upload) -> dict[str, str]:
    """Write a form's file as far as there is room for it; return the other fields and its name."""
    context, trace, files = request.app[CONTEXT], request[TRACE], request.app[RUNNER].files
    trace.body = held = context.bodies.body(trace.payer)  # what is not written yet

    async def write(part: bytes) -> None:
        await held.take(len(part))
        await files.arrive(trace.owner, len(part))
        await upload.add(part)
        if not held.is_over:
            held.add(upload.num_waiting - held.num_bytes)

    try:
        async with asyncio.timeout(_UPLOAD_S) as timer:
            held.may_end(lambda: timer.reschedule(0.0))
            return await _read_form(request, write, context.config.body_timeout_s)
    except TimeoutError as error:
        if held.was_ended:
            raise BuffersFull(SLOW) from error
        raise web.HTTPRequestTimeout(text="the file did not arrive in time") from error
    finally:
        held.arrived()


async def list_files(runner: BatchRunner, question: Question) -> web.Response:
    """GET /v1/files: list the tenant's files, the newest first by default."""
    owner, files, query = question.trace.owner, runner.files, question.query
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"'order' is {order[:64]!r}, but must be 'asc' or 'desc'", "order")
    limit = whole_number("limit", query.get("limit", str(MAX_LISTED)), 1, MAX_LISTED)
    after = query.get("after")
    found = await files.page(
        owner,
        after=None if after is None else await files.get(owner, after),
        limit=limit + 1,
        newest_first=order == "desc",
        purpose=query.get("purpose", ""),
    )
    shown = [file_shown(file) for file in found[:limit]]
    return json_answer(
        FileList(
            data=shown,
            first_id=shown[0].id if shown else None,
            last_id=shown[-1].id if shown else None,
            has_more=len(found) > limit,
        )
    )


async def get_file(runner: BatchRunner, question: Question) -> web.Response:
    """GET /v1/files/{id}: describe a file."""
    return json_answer(file_shown(await _asked(runner, question)))


async def get_content(runner: BatchRunner, question: Question) -> Content:
    """GET /v1/files/{id}/content: a file's bytes."""
    return Content(await _asked(runner, question), "application/octet-stream")


async def delete_file(runner: BatchRunner, question: Question) -> web.Response:
    """DELETE /v1/files/{id}: delete a file."""
    file_id = question.names["file"]
    await runner.files.delete(question.trace.owner, file_id)
    return json_answer(DeletedFile(id=file_id))


async def _asked(runner: BatchRunner, question: Question) -> StoredFile:
    return await runner.files.get(question.trace.owner, question.names["file"])


@dataclass(frozen=True, slots=True)
class Content:
    """An answer: all that a file holds."""

    file: StoredFile
    media: str


def sent(find: Callable[[BatchRunner, Question], Awaitable[Content]]) -> Handler:
    """Return the handler that sends a file, at the pace at which the client reads it."""

    async def handle(request: web.Request) -> web.StreamResponse:
        runner, outbox = request.app[RUNNER], request[TRACE].way_out
        content, owner = await find(runner, question(request)), request[TRACE].owner
        response = web.StreamResponse(headers={"Content-Type": content.media})
        response.content_length = num_left = content.file.num_bytes
        await outbox.reserve(min(num_left, CHUNK_BYTES))  # before it is read, however slowly it is
        await response.prepare(request)
        try:
            async for chunk in runner.files.read(owner, content.file.id):
                await outbox.send(response.write, chunk)
                num_left -= len(chunk)
                await outbox.reserve_next(min(num_left, CHUNK_BYTES))
            if num_left:
                raise ItemNotFound(f"{content.file.id} was deleted while it was sent", "file_id")
            await outbox.in_time(response.write_eof())
        except Exception:  # no other bytes may stand for those that do not come
            if request.transport is not None:
                request.transport.abort()
            raise
        return response

    return handle


async def _read_form(
    request: web.Request, write: Callable[[bytes], Awaitable[None]], wait_s: float
) -> dict[str, str]:
    """Read the form, and write its file; return its other fields, and the file's name."""
    num_bytes = 0
    fields: dict[str, str] = {}
    try:
        form = await request.multipart()
        while (part := await _next(form.next(), wait_s)) is not None:
            if not isinstance(part, BodyPartReader):
                raise InvalidRequest("a part of the form has parts of its own")
            name = (part.name or "")[:64]
            if name in fields or name not in ("file", *_FIELDS):
                raise InvalidRequest(f"unrecognized or repeated field: {name!r}", name)
            if name != "file":
                fields[name] = (await _next(part.read_chunk(_MAX_FIELD_BYTES), wait_s)).decode()
                continue
            file_name = part.filename or "file"  # bytes that are no text are halves of pairs in it
            fields[name] = file_name[:256].encode(errors="replace").decode().replace("\0", "?")
            while chunk := await _next(part.read_chunk(2**16), wait_s):
                num_bytes += len(chunk)
                if num_bytes > MAX_FILE_BYTES:
                    raise web.HTTPRequestEntityTooLarge(MAX_FILE_BYTES, num_bytes)
                await write(bytes(chunk))
    except (ValueError, AssertionError) as error:
        raise InvalidRequest(f"the form cannot be read: {error}") from error
    except HttpProcessingError as error:  # of a part's headers
        raise InvalidRequest(f"the form cannot be read: {error.message}") from error
    if "file" not in fields:
        raise InvalidRequest("the form needs 'file'", "file")
    return fields


async def _next(reading: Awaitable[T], wait_s: float) -> T:
    async with asyncio.timeout(wait_s):
        return await reading


def _keep_s(fields: Mapping[str, str]) -> int:
    seconds = fields.get("expires_after[seconds]")
    if seconds is None:
        return MAX_KEPT_S
    if fields.get("expires_after[anchor]") != "created_at":
        raise InvalidRequest("'expires_after' needs 'anchor' to be 'created_at'", "expires_after")
    return whole_number("expires_after[seconds]", seconds, MIN_KEPT_S, MAX_KEPT_S)
