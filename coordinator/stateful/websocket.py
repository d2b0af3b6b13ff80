"""GET /v1/responses: serves the same calls over a WebSocket, one at a time.

Each message has the fields of a POST body; the response's events are sent back as messages. The
latest response can be continued on the same connection even if it is not to be stored.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from aiohttp import WSCloseCode, WSMsgType, web

from coordinator.api.answer.call import Call
from coordinator.api.answer.run import send_new
from coordinator.api.context import CONTEXT, TRACE, ApiContext, RequestTrace
from coordinator.api.read.ask import Ask
from coordinator.api.read.body_budget import FULL, SLOW
from coordinator.api.read.json_text import JsonReader
from coordinator.api.server import callers
from coordinator.api.server.callers import CLIENT_GONE, begin_call, conclude
from coordinator.api.server.connection import Connection
from coordinator.api.server.errors import ErrorReply, describe
from coordinator.api.server.middleware import check_socket_origin
from coordinator.stateful.asked import read_asked
from coordinator.stateful.plan import Planned, plan_asked
from coordinator.stateful.socket_inbox import MAX_MESSAGE_BYTES, SocketInbox
from coordinator.stateful.socket_messages import as_message, body_of, refusal
from coordinator.stateful.storage.store import STORE
from coordinator.stateful.storage.stored import StoredResponse
from pdserve.shared.errors import BuffersFull, ConnectionExpired, NodeDraining

_log = logging.getLogger(__name__)


async def respond_over_websocket(request: web.Request) -> web.StreamResponse:
    """Serve calls until the connection ends. Raises HTTPUpgradeRequired or PermissionDenied."""
    context = request.app[CONTEXT]
    socket = web.WebSocketResponse(
        max_msg_size=min(MAX_MESSAGE_BYTES, context.config.max_body_bytes),
        autoping=False,
        compress=False,  # a few kilobytes would become a message of the maximum size
        decode_text=False,  # JSON is decoded from bytes
    )
    if not socket.can_prepare(request).ok:
        raise web.HTTPUpgradeRequired(
            text=f"GET {request.path} opens a WebSocket and needs its handshake"
        )
    check_socket_origin(request, context.config.cors_origins)
    session = _Session(request, context, socket)
    try:
        with suppress(ConnectionError):  # the client is gone
            await socket.prepare(request)
            await session.run()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not context.tasks.is_aborting or task is None:
            raise
        task.uncancel()
        await session.shut_down()
    finally:
        session.end()
    return socket


class _Session:
    """Serves the calls of one connection."""

    def __init__(
        self, request: web.Request, context: ApiContext, socket: web.WebSocketResponse
    ) -> None:
        self._request = request
        self._context = context
        self._store = request.app[STORE]
        self._socket = socket
        self._held = context.bodies.body(request[TRACE].payer)
        self._inbox = SocketInbox(socket, request.transport, context.config, self._held)
        assert isinstance(request.protocol, Connection)
        self._inbox.listen(request.protocol)
        self._outbox = request.protocol.outbox
        self._latest: StoredResponse | None = None  # the latest response, unless it is to be stored

    async def run(self) -> None:
        """Serve calls until the client disconnects, the connection expires or the server drains."""
        clock = self._context.clock
        age_s = self._context.config.socket_age_s
        until_s = clock.now() + age_s
        draining = asyncio.ensure_future(self._context.tasks.draining.wait())
        full = asyncio.ensure_future(self._inbox.is_full.wait())
        receiving = asyncio.ensure_future(self._inbox.receive())
        watching = asyncio.ensure_future(self._inbox.watch())
        try:
            while True:
                await asyncio.wait(
                    {receiving, draining, full},
                    timeout=max(0.0, until_s - clock.now()),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if draining.done():
                    return await self.shut_down()
                if full.done():
                    return await self._close(BuffersFull(SLOW if self._held.was_ended else FULL))
                if not receiving.done():
                    return await self._close(
                        ConnectionExpired(f"a connection is good for {age_s:g} s")
                    )
                message = receiving.result()
                if message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                    return None  # the connection has ended
                receiving = asyncio.ensure_future(self._inbox.receive())
                await self._turn(message.data)
        finally:
            draining.cancel()
            full.cancel()
            receiving.cancel()
            watching.cancel()

    async def shut_down(self) -> None:
        """Tell the client that the server is shutting down, and close the connection."""
        await self._close(NodeDraining("the coordinator is shutting down"))

    def forget(self) -> None:
        """Remove the latest response from the store, if it was not to be stored."""
        if self._latest is not None:
            self._store.discard(self._latest)
            self._latest = None

    def end(self) -> None:
        """Give back what the connection holds."""
        self.forget()
        self._held.release()

    async def _close(self, error: Exception) -> None:
        with suppress(ConnectionError):
            await self._refuse(self._described(error, self._request[TRACE]))
            await self._socket.close(code=WSCloseCode.GOING_AWAY)

    # ---- one call ------------------------------------------------------------------------------

    async def _turn(self, message: bytes) -> None:
        trace = self._new_trace()
        status, code = CLIENT_GONE, "client_disconnected"
        planned: Planned | None = None
        try:
            planned = await self._plan(message, trace)
            await self._run(planned, trace)
            self._keep(planned)
            status, code = 200, ""
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001  any error is reported to the client
            self.forget()
            reply = self._described(error, trace)
            status, code = reply.status, reply.detail.code or ""
            if planned is None or not trace.is_streaming:
                await self._refuse(reply)
            else:
                await self._send([planned.format.failure(reply.detail)])
        finally:
            conclude(self._context, trace, status, code or None)

    async def _plan(self, message: bytes, trace: RequestTrace) -> Planned:
        context = self._context
        callers.identify(self._request, context, trace)  # a key or a limit may have changed
        trace.span = context.begin_span(self._request.headers)
        begin_call(trace, self._request.path, context)
        trace.body = held = context.bodies.body(trace.payer)
        held.add(len(message))  # it was counted while it arrived
        values = await JsonReader().read_long(message, "the message", held)
        ask = Ask(body_of(values), self._request.headers, context, trace)
        read = partial(read_asked, store=self._store, find_local=self._find_latest)
        return await plan_asked(ask, read, as_message)

    async def _run(self, planned: Planned, trace: RequestTrace) -> None:
        with Call(self._context, trace, planned.call) as call:
            while not call.is_finished:
                await call.wait()
                is_first = not trace.is_streaming
                trace.is_streaming = True
                await send_new(call, planned.call, self._send, is_first=is_first)

    def _keep(self, planned: Planned) -> None:
        """Keep a response that is not to be stored, so that the next call can continue it.

        It is put into the store, which bounds memory, under an id that only this connection knows.
        """
        self.forget()
        if not planned.is_stored:
            local_id = self._local_id(planned.stored.id)
            self._latest = replace(planned.stored, id=local_id, is_durable=False)
            self._store.put(self._latest)

    def _find_latest(self, response_id: str) -> StoredResponse | None:
        latest = self._latest
        if latest is None or latest.id != self._local_id(response_id):
            return None
        return latest if self._store.has(latest) else None

    def _local_id(self, response_id: str) -> str:
        return f"{self._request[TRACE].unique}/{response_id}"

    # ---- messages ------------------------------------------------------------------------------

    async def _send(self, messages: Sequence[bytes]) -> None:
        """Send messages. Raises ConnectionResetError when the client stops reading."""
        for message in messages:
            if self._outbox.is_short(len(message)):
                await self._socket.send_str(message.decode())
            else:
                send = partial(self._socket.send_str, message.decode())
                await self._outbox.send_one(send, len(message))

    async def _refuse(self, reply: ErrorReply) -> None:
        await self._send([refusal(reply)])

    def _described(self, error: Exception, trace: RequestTrace) -> ErrorReply:
        reply = describe(error, trace.request_id, self._context.config.retry_after_s)
        if reply.status == web.HTTPInternalServerError.status_code:
            _log.error("request %s failed", trace.request_id, exc_info=error)
        return reply

    def _new_trace(self) -> RequestTrace:
        unique = uuid.uuid4().hex
        return RequestTrace(
            unique=unique,
            request_id=f"req-{unique}",
            received_s=self._context.clock.now(),
            address=self._request[TRACE].address,
        )
