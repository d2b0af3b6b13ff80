"""Generates background responses again whose coordinator ended before they were finished.

They keep their ids, their seeds and their terms. A node that still has a leg of one goes on with it
(`coordinator/requests/claims.py`); otherwise its tokens are computed again, and are the same.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import msgspec

from coordinator.api.context import ApiContext, RequestTrace
from coordinator.api.read.ask import Ask
from coordinator.api.read.idempotency import KeyedCall
from coordinator.api.server.errors import describe
from coordinator.stateful.asked import read_asked
from coordinator.stateful.background import BackgroundRun
from coordinator.stateful.plan import plan_asked
from coordinator.stateful.storage.order import MAX_RUNS, Order
from coordinator.stateful.storage.saved_entries import failure
from coordinator.stateful.storage.store import ResponseStore
from coordinator.stateful.storage.stored import StoredResponse
from pdserve.shared.errors import PdserveError, PermissionDenied

_log = logging.getLogger(__name__)
_ENDPOINT = "/v1/responses"


def go_on(context: ApiContext, store: ResponseStore, ready: asyncio.Event) -> None:
    """Begin every background response that nobody makes any more again, once there are nodes."""

    def again(stored: StoredResponse) -> None:
        stored.making = context.tasks.start(_again(context, store, stored, ready))

    store.go_on(again)


async def _again(
    context: ApiContext, store: ResponseStore, stored: StoredResponse, ready: asyncio.Event
) -> None:
    order = stored.order
    assert order is not None
    if order.num_runs >= MAX_RUNS:
        return _end(store, stored, failure(f"{MAX_RUNS} coordinators ended while they made it"))
    try:
        if await _is_ready(context, ready):
            await _begin(context, store, stored, order)
    except asyncio.CancelledError:
        if not context.tasks.is_aborting:  # else the next coordinator begins it
            _end(store, stored, {"status": "cancelled"})
        raise
    except PdserveError as error:
        detail = describe(error, order.request_id, context.config.retry_after_s).detail
        told = {"code": detail.code, "message": detail.message}
        _end(store, stored, {"status": "failed", "error": told})


async def _is_ready(context: ApiContext, ready: asyncio.Event) -> bool:
    """Wait for nodes; returns False if the coordinator is to end before."""
    waits = [asyncio.ensure_future(e.wait()) for e in (ready, context.tasks.draining)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return not context.tasks.is_draining


async def _begin(
    context: ApiContext, store: ResponseStore, stored: StoredResponse, order: Order
) -> None:
    """Begin the call; from then on a response of the same id is in the place of `stored`."""
    caller = context.tenants.stand_in(stored.owner, order.key_id)
    if caller is None:
        raise PermissionDenied("the tenant of this response does not exist any more")
    order.num_runs += 1
    trace = RequestTrace(
        unique=order.unique,
        request_id=order.request_id,
        received_s=context.clock.now(),
        address=order.address,
        caller=caller,
        keyed=KeyedCall(stored.owner, "", _ENDPOINT, None, digest=order.digest),
        endpoint=_ENDPOINT,
    )
    ask = Ask(msgspec.json.decode(order.body), order.headers, context, trace)
    planned = await plan_asked(ask, partial(read_asked, store=store), order=order)
    trace.is_streaming = planned.call.is_streaming
    planned.stored.log = stored.log  # somebody may be following it
    BackgroundRun(context, store, trace, planned, lambda: None).begin()
    await store.saved()
    _log.info("response %s is generated again", stored.id)


def _end(store: ResponseStore, stored: StoredResponse, changes: dict[str, object]) -> None:
    """Have it ended without another run."""
    stored.order = None
    stored.making = None
    stored.body = msgspec.json.encode(msgspec.json.decode(stored.body) | changes)
    if stored.log is not None:
        stored.log.close()
    store.changed(stored)
