"""State shared by all endpoints, and the trace of the request being handled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from aiohttp import web

from coordinator.api.answer.arrivals import WriteTurns
from coordinator.api.answer.bodies import TierUsage
from coordinator.api.answer.formats import EndsFailed
from coordinator.api.answer.sse import SseStream
from coordinator.api.config import ApiConfig
from coordinator.api.embeddings.places import PromptPlaces
from coordinator.api.observer import Observer, RequestSummary
from coordinator.api.read.body_budget import Body, BodyBudget
from coordinator.api.read.idempotency import KeyedCall, KnownKeys
from coordinator.api.server.outbox import HttpOutbox
from coordinator.models.model import Catalog, ListedModel
from coordinator.tenants import Admitted, Readers, Tenant, Tenants
from coordinator.tenants.identity import ANYBODY
from coordinator.tracing.call_span import CallSpan
from pdserve.protocol import Slo
from pdserve.shared.clock import Clock
from pdserve.shared.slo import ServiceClasses


class RunningTasks:
    """Tasks that answer requests or generate background responses.

    They are tracked so that the server can drain them before it stops.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()
        self.draining = asyncio.Event()  # also awaited by idle WebSocket connections
        self._is_aborting = False

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused."""
        return self.draining.is_set()

    @property
    def is_aborting(self) -> bool:
        """Whether tasks are being cancelled by the server, rather than by disconnecting clients."""
        return self._is_aborting

    def __len__(self) -> int:
        return len(self._tasks)

    def __enter__(self) -> None:
        """Register the current task as answering a request, while the context is open."""
        self._tasks.add(_current_task())

    def __exit__(self, *_: object) -> None:
        self._tasks.discard(_current_task())

    def start(self, making: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Start and register a task that may outlive its HTTP request."""
        task = asyncio.create_task(making)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, and wait up to `grace_s` for running tasks to finish."""
        self.draining.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._tasks:  # a request may leave a task behind
                    await asyncio.wait(self._tasks)

    async def abort(self, timeout_s: float) -> None:
        """Cancel running tasks; wait up to `timeout_s` while each sends its client an error."""
        self._is_aborting = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)


def _current_task() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None
    return task


BeginSpan: TypeAlias = Callable[[Mapping[str, str]], CallSpan | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiContext:
    """Shared dependencies of the endpoints; one per application."""

    models: Catalog
    config: ApiConfig
    observer: Observer
    metrics: Callable[[], Awaitable[bytes]]
    classes: ServiceClasses
    tenants: Tenants
    readers: Readers
    clock: Clock
    write_turns: WriteTurns
    long_turns: WriteTurns  # of pieces of long work
    bodies: BodyBudget
    prompt_places: PromptPlaces
    known_keys: KnownKeys
    begin_span: BeginSpan  # of a call, if it is recorded
    tasks: RunningTasks = field(default_factory=RunningTasks)

    def listed(self, name: str | None, trace: RequestTrace) -> ListedModel:
        """Return the model of this name, for the call that asks for it.

        Raises:
            ModelNotFound: there is none, or not for this caller.
            NoNodeAvailable: it is an adapter that is not loaded yet.
        """
        call = None if trace.keyed is None else trace.keyed.digest
        model = self.models.find(name, trace.owner, trace.tenant.may_use, call)
        trace.model = model.parent or model.name
        return model


@dataclass(slots=True, kw_only=True)
class RequestTrace:
    """What is known of one HTTP request so far."""

    unique: str  # unique string from which this request's ids are made
    request_id: str  # the client's, if it sent a valid one
    received_s: float
    address: str = ""  # the client's
    outbox: HttpOutbox | None = None  # of its connection; None: it is not a server's
    body: Body | None = None  # the memory that its body holds; None: not read yet
    span: CallSpan | None = None  # None: the call is not recorded
    caller: Admitted | None = None  # the caller; None: path needs no key, or not identified yet
    keyed: KeyedCall | None = None  # what its idempotency key makes of it, if it has one
    endpoint: str | None = None  # set once it is a call of a generating endpoint
    model: str = ""  # own name of the one that it asks for, once known
    slo: Slo | None = None  # targets of its service class, once known
    is_streaming: bool = False
    stream: SseStream | None = None
    format: EndsFailed | None = None  # format of the stream
    tiers: list[TierUsage] = field(default_factory=list)  # of a cascade that did not answer
    is_elsewhere: bool = False  # a server elsewhere answers
    num_choices: int = 0
    num_prompt_tokens: int = 0
    num_dispatched_tokens: int = 0  # of these, in prompts that were sent to nodes; known at the end
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_accepted: int = 0  # of these: they had been guessed
    num_refused: int = 0  # guesses that were wrong
    num_decode_precision: int = 0  # prompt tokens that weights of decode nodes have computed
    first_token_s: float | None = None  # arrival of the first token with text
    last_token_s: float | None = None
    finish_reason: str | None = None

    @property
    def owner(self) -> str:
        """The tenant's name; empty when API keys are not in use."""
        return "" if self.caller is None else self.caller.tenant.name

    @property
    def tenant(self) -> Tenant:
        """The tenant; anybody when API keys are not in use."""
        return ANYBODY if self.caller is None else self.caller.tenant

    @property
    def payer(self) -> str:
        """Who pays for what is done before the call runs: the tenant, or else the address."""
        return self.owner or self.address

    @property
    def way_out(self) -> HttpOutbox:
        """The way out of its connection, which is a server's."""
        assert self.outbox is not None, "it is served by an HttpServer"
        return self.outbox

    def release_body(self) -> None:
        """Give back the memory of the body: it is not needed any more."""
        if self.body is not None:
            self.body.release()
            self.body = None

    async def keep_of_body(self, num_bytes: int) -> None:
        """Hold so much of the memory of the body until the call ends. Raises BuffersFull."""
        if self.body is not None:
            more = num_bytes - self.body.num_bytes
            if more > 0:
                await self.body.take_most(more)
            else:
                self.body.add(more)

    def without_call(self) -> RequestTrace:
        """Return a trace for the HTTP request alone; the background call keeps this one."""
        return RequestTrace(
            unique=self.unique,
            request_id=self.request_id,
            received_s=self.received_s,
            address=self.address,
            outbox=self.outbox,
            caller=self.caller,
        )

    def summary(self, endpoint: str, status: int, code: str | None, now_s: float) -> RequestSummary:
        """Return the summary of the finished request. `now_s` is its end if it failed."""
        succeeded = code is None and self.last_token_s is not None
        end_s = self.last_token_s if succeeded and self.last_token_s is not None else now_s
        e2e_s = end_s - self.received_s
        ttft_s = None if self.first_token_s is None else self.first_token_s - self.received_s
        num_further = self.num_completion_tokens - 1
        has_tpot = ttft_s is not None and num_further > 0 and self.num_choices == 1
        return RequestSummary(
            request_id=self.request_id,
            endpoint=endpoint,
            model=self.model,
            slo=self.slo,
            is_streaming=self.is_streaming,
            status=status,
            error_code=code,
            finish_reason=self.finish_reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_completion_tokens=self.num_completion_tokens,
            e2e_s=e2e_s,
            ttft_s=ttft_s,
            tpot_s=(e2e_s - ttft_s) / num_further if has_tpot and ttft_s is not None else None,
            received_s=self.received_s,
            duration_s=now_s - self.received_s,
            span=self.span,
            tenant=self.owner,
            is_elsewhere=self.is_elsewhere,
            lost_tiers=self.tiers,
        )


CONTEXT = web.AppKey("CONTEXT", ApiContext)
TRACE = web.RequestKey("TRACE", RequestTrace)  # set by the middleware
