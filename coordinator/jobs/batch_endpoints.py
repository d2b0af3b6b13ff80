"""/v1/batches: create, list, read and cancel."""

from __future__ import annotations

from secrets import token_hex
from time import time

from aiohttp import web

from coordinator.api.answer.bodies import json_answer
from coordinator.api.calls import CALLS
from coordinator.api.context import CONTEXT, TRACE
from coordinator.api.read.body import read_request
from coordinator.api.server import callers
from coordinator.jobs.keys import RUNNER
from coordinator.jobs.objects import BatchList, BatchRequest, BatchShown, batch_shown
from coordinator.jobs.runner import BatchRunner
from coordinator.jobs.storage.batches import Batch, BatchDocument
from coordinator.stateful.pages import whole_number
from pdserve.shared.errors import InvalidRequest

WINDOW_S = 86400
MAX_LISTED = 100


async def create_batch(request: web.Request) -> web.Response:
    """POST /v1/batches: have the lines of a file answered."""
    context, trace, runner = request.app[CONTEXT], request[TRACE], request.app[RUNNER]
    callers.begin(context, trace)
    body = await read_request(request, BatchRequest, context.config)
    calls = request.app[CALLS]
    if body.endpoint not in calls:
        known = ", ".join(calls)
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


async def list_batches(request: web.Request) -> web.Response:
    """GET /v1/batches: list the tenant's batches, the newest first."""
    owner, runner, query = request[TRACE].owner, request.app[RUNNER], request.query
    limit = whole_number("limit", query.get("limit", "20"), 1, MAX_LISTED)
    after = query.get("after")
    behind = None if after is None else await runner.batches.get(owner, after, "batch")
    found = await runner.batches.page(owner, "batch", behind=behind, limit=limit + 1)
    shown = [await _shown(runner, batch) for batch in found[:limit]]
    return json_answer(
        BatchList(
            data=shown,
            first_id=shown[0].id if shown else None,
            last_id=shown[-1].id if shown else None,
            has_more=len(found) > limit,
        )
    )


async def get_batch(request: web.Request) -> web.Response:
    """GET /v1/batches/{id}: describe a batch, and count its lines."""
    return json_answer(await _shown(request.app[RUNNER], await _asked(request)))


async def cancel_batch(request: web.Request) -> web.Response:
    """POST /v1/batches/{id}/cancel: have it end early; what is answered is kept."""
    runner, batch = request.app[RUNNER], await _asked(request)
    cancelled = await runner.batches.cancel(batch)
    if cancelled is None and batch.status != "cancelling":
        raise InvalidRequest(f"the batch is {batch.status}: it cannot be cancelled any more")
    runner.look_now()
    return json_answer(await _shown(runner, cancelled or batch))


async def _asked(request: web.Request) -> Batch:
    batch_id = request.match_info["batch"]
    return await request.app[RUNNER].batches.get(request[TRACE].owner, batch_id, "batch")


async def _shown(runner: BatchRunner, batch: Batch) -> BatchShown:
    return batch_shown(batch, await runner.batches.counts(batch))
