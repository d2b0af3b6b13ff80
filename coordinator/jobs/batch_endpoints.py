"""/v1/batches: create, list, read and cancel."""

from __future__ import annotations

from secrets import token_hex
from time import time

from aiohttp import web

from coordinator.api.answer.bodies import json_answer
from coordinator.api.read.ask import Question
from coordinator.api.server import callers
from coordinator.jobs.objects import BatchList, BatchRequest, BatchShown, batch_shown
from coordinator.jobs.runner import BatchRunner
from coordinator.jobs.storage.batches import Batch, BatchDocument
from coordinator.stateful.pages import whole_number
from pdserve.shared.errors import InvalidRequest

WINDOW_S = 86400
MAX_LISTED = 100


async def create_batch(runner: BatchRunner, question: Question) -> web.Response:
    """POST /v1/batches: have the lines of a file answered."""
    trace = question.trace
    callers.begin(question.context, trace)
    body = await question.body(BatchRequest)
    if body.endpoint not in runner.calls:
        known = ", ".join(runner.calls)
        raise InvalidRequest(
            f"'endpoint' is {body.endpoint[:64]!r}, but batches can call {known}", "endpoint"
        )
    await runner.files.get(trace.owner, body.input_file_id)
    await runner.files.check_room(trace.owner, 0)
    kept = body.output_expires_after
    document = BatchDocument(
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        metadata=body.metadata,
        key_id="" if trace.caller is None else trace.caller.key_id,
    )
    if kept is not None:
        document.output_keep_s = kept.seconds
    now = int(time())
    batch_id = f"batch_{token_hex(12)}"
    batch = Batch(batch_id, trace.owner, "batch", "validating", now, now + WINDOW_S, document)
    await runner.batches.add(batch)
    runner.look_now()
    return json_answer(batch_shown(batch, {}))


async def list_batches(runner: BatchRunner, question: Question) -> web.Response:
    """GET /v1/batches: list the tenant's batches, the newest first."""
    owner, query = question.trace.owner, question.query
    limit = whole_number("limit", query.get("limit", "20"), 1, MAX_LISTED)
    after = query.get("after")
    behind = None if after is None else await runner.batches.get(owner, after, "batch")
    found = await runner.batches.page(owner, "batch", behind=behind, limit=limit + 1)
    listed = found[:limit]
    counts = await runner.batches.counts(*listed)
    shown = [batch_shown(batch, of) for batch, of in zip(listed, counts, strict=True)]
    return json_answer(
        BatchList(
            data=shown,
            first_id=shown[0].id if shown else None,
            last_id=shown[-1].id if shown else None,
            has_more=len(found) > limit,
        )
    )


async def get_batch(runner: BatchRunner, question: Question) -> web.Response:
    """GET /v1/batches/{id}: describe a batch, and count its lines."""
    return json_answer(await _shown(runner, await _asked(runner, question)))


async def cancel_batch(runner: BatchRunner, question: Question) -> web.Response:
    """POST /v1/batches/{id}/cancel: have it end early; what is answered is kept."""
    batch = await _asked(runner, question)
    cancelled = await runner.batches.cancel(batch)
    if cancelled is None and batch.status != "cancelling":
        raise InvalidRequest(f"the batch is {batch.status}: it cannot be cancelled any more")
    runner.look_now()
    return json_answer(await _shown(runner, cancelled or batch))


async def _asked(runner: BatchRunner, question: Question) -> Batch:
    return await runner.batches.get(question.trace.owner, question.names["batch"], "batch")


async def _shown(runner: BatchRunner, batch: Batch) -> BatchShown:
    (counts,) = await runner.batches.counts(batch)
    return batch_shown(batch, counts)
