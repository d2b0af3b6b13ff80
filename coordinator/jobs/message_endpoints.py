"""/v1/messages/batches: create, list, read, cancel and delete; and their results."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from secrets import token_hex
from time import time

from aiohttp import web

from coordinator.api.answer.bodies import json_answer
from coordinator.api.read.ask import Question
from coordinator.api.read.json_text import JsonReader
from coordinator.api.server import callers
from coordinator.api.server.middleware import MESSAGES
from coordinator.jobs.batch_endpoints import WINDOW_S
from coordinator.jobs.file_endpoints import Content
from coordinator.jobs.lines import Faulty, check_custom_id, make_line
from coordinator.jobs.message_objects import (
    BatchedMessage,
    DeletedMessageBatch,
    MessageBatch,
    MessageBatchPage,
    MessageBatchRequest,
    message_batch,
)
from coordinator.jobs.runner import BatchRunner
from coordinator.jobs.storage.batches import PIECE, Batch, BatchDocument, Line
from coordinator.stateful.pages import whole_number
from pdserve.shared.errors import InvalidRequest, ItemNotFound

BATCHES = f"{MESSAGES}/batches"
_MAX_LISTED = 1000


async def create_batch(runner: BatchRunner, question: Question) -> web.Response:
    """POST /v1/messages/batches: have messages answered."""
    trace = question.trace
    callers.begin(question.context, trace)
    body = await question.long_body(MessageBatchRequest)
    lines = await _lines(body.requests)
    num_bytes = sum(len(line.body) for line in lines)
    key_id = "" if trace.caller is None else trace.caller.key_id
    now = int(time())
    document = BatchDocument(endpoint=MESSAGES, key_id=key_id, total=len(lines), in_progress_at=now)
    batch_id = f"msgbatch_{token_hex(12)}"
    batch = Batch(batch_id, trace.owner, "messages", "in_progress", now, now + WINDOW_S, document)
    await runner.files.check_room(trace.owner, 0)
    await runner.files.arrive(trace.owner, num_bytes)
    try:
        await runner.batches.add(batch, lines)
    finally:
        runner.files.arrived(trace.owner, num_bytes)
    runner.look_now()
    return await _answer(runner, question, batch)


async def list_batches(runner: BatchRunner, question: Question) -> web.Response:
    """GET /v1/messages/batches: list the tenant's batches, the newest first."""
    owner, batches, query = question.trace.owner, runner.batches, question.query
    limit = whole_number("limit", query.get("limit", "20"), 1, _MAX_LISTED)
    before, after = query.get("before_id"), query.get("after_id")
    named = before or after
    found = await batches.page(
        owner,
        "messages",
        behind=None if named is None else await batches.get(owner, named, "messages"),
        limit=limit + 1,
        newest_first=before is None,
    )
    shown = await _shown(runner, question, *found[:limit])
    if before is not None:
        shown.reverse()
    page = MessageBatchPage(
        data=shown,
        has_more=len(found) > limit,
        first_id=shown[0].id if shown else None,
        last_id=shown[-1].id if shown else None,
    )
    return json_answer(page)


async def get_batch(runner: BatchRunner, question: Question) -> web.Response:
    """GET /v1/messages/batches/{id}: describe a batch, and count its requests."""
    return await _answer(runner, question, await _asked(runner, question))


async def cancel_batch(runner: BatchRunner, question: Question) -> web.Response:
    """POST /v1/messages/batches/{id}/cancel: have it end early; what is answered is kept."""
    batch = await _asked(runner, question)
    cancelled = await runner.batches.cancel(batch)
    runner.look_now()
    return await _answer(runner, question, cancelled or await _asked(runner, question))


async def delete_batch(runner: BatchRunner, question: Question) -> web.Response:
    """DELETE /v1/messages/batches/{id}: delete a batch that has ended, and its results."""
    batch = await _asked(runner, question)
    if not batch.has_ended:
        raise InvalidRequest("the batch has not ended: cancel it first")
    with suppress(ItemNotFound):  # it has expired
        await runner.files.delete(batch.owner, batch.document.output_file_id or "")
    await runner.batches.delete(batch)
    return json_answer(DeletedMessageBatch(id=batch.id))


async def get_results(runner: BatchRunner, question: Question) -> Content:
    """GET /v1/messages/batches/{id}/results: what became of each request."""
    batch = await _asked(runner, question)
    if not batch.has_ended:
        raise InvalidRequest("the batch has no results before it has ended")
    file_id = batch.document.output_file_id or ""
    file = await runner.files.get(batch.owner, file_id)
    return Content(file, "application/x-jsonl")


async def _lines(requests: list[BatchedMessage]) -> list[Line]:
    known: set[str] = set()
    lines: list[Line] = []
    for i, one in enumerate(requests):
        where = f"requests[{i}]"
        params = JsonReader().read(bytes(one.params), f"{where}.params", where)
        if not isinstance(params, dict):
            raise InvalidRequest(f"{where}.params must be an object", where)
        try:
            check_custom_id(one.custom_id, known)
            lines.append(make_line(i, one.custom_id, params))
        except Faulty as fault:
            raise InvalidRequest(f"{where}: {fault.message}", where) from fault
        if i % PIECE == 0:
            await asyncio.sleep(0)  # others want the event loop, too
    return lines


async def _asked(runner: BatchRunner, question: Question) -> Batch:
    return await runner.batches.get(question.trace.owner, question.names["batch"], "messages")


async def _shown(runner: BatchRunner, question: Question, *batches: Batch) -> list[MessageBatch]:
    where = f"{question.server}{BATCHES}"
    counts = await runner.batches.counts(*batches)
    return [
        message_batch(batch, of, f"{where}/{batch.id}/results")
        for batch, of in zip(batches, counts, strict=True)
    ]


async def _answer(runner: BatchRunner, question: Question, batch: Batch) -> web.Response:
    (shown,) = await _shown(runner, question, batch)
    return json_answer(shown)
