"""An open-loop client: requests go out when they are due, whatever became of those before them.

A closed loop waits for a slow server and so measures only what the server is comfortable with.
Here a server that falls behind meets the same arrivals as one that does not. How late the client
itself was is measured too, at every request and by a clock that ticks beside them: what it reports
is good only as long as that is little.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import aiohttp
import msgspec

from pdserve.bench.load import completion_body, open_session
from pdserve.bench.slo_score import Outcome
from pdserve.bench.workload import TimedRequest
from pdserve.errors import ClusterError

_TICK_S = 0.02
_REFUSED = 429
_DATA = b"data: "
_DONE = b"[DONE]"
_SAID_CHARS = 120  # of an error, that are kept


@dataclass(frozen=True, slots=True)
class Run:
    """What one run has seen."""

    outcomes: list[Outcome]  # in the order of the requests
    lags_s: list[float]  # by how much the client's clock was late at each of its ticks


class OpenLoopClient:
    """Sends timed requests to one coordinator."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._url = url
        self._model = model

    async def run(self, requests: Sequence[TimedRequest], salt: str, drain_s: float) -> Run:
        """Send each request when it is due, and give those that run `drain_s` after the last one.

        Args:
            requests: by time.
            salt: prefixes are shared only between requests of one salt, so not between runs.
            drain_s: after it, requests that still run are hung up on: they stay "unfinished".
        """
        bodies = [self._body(request, salt) for request in requests]
        outcomes = [_nothing_yet(request) for request in requests]
        lags_s: list[float] = []
        sending: set[asyncio.Task[None]] = set()
        with _without_garbage_collection():
            start_s = time.perf_counter()
            ticking = asyncio.create_task(_tick(lags_s))
            try:
                for body, outcome in zip(bodies, outcomes, strict=True):
                    await asyncio.sleep(start_s + outcome.due_s - time.perf_counter())
                    sending.add(asyncio.create_task(self._send(body, outcome, start_s)))
                await asyncio.wait(sending, timeout=drain_s)
            finally:
                for task in (ticking, *sending):
                    task.cancel()
                await asyncio.wait((ticking, *sending))
        for task in sending:
            if not task.cancelled():
                task.result()
        return Run(outcomes, lags_s)

    async def one_by_one(
        self, requests: Sequence[TimedRequest], salt: str, deadline_s: float
    ) -> list[Outcome]:
        """Send each request when the one before it has ended: what an idle cluster does.

        Raises:
            ClusterError: one of them did not finish, or not within `deadline_s`.
        """
        outcomes = []
        for request in requests:
            outcome = _nothing_yet(request)
            try:
                async with asyncio.timeout(deadline_s):
                    await self._send(self._body(request, salt), outcome, time.perf_counter())
            except TimeoutError as error:
                raise ClusterError(
                    f"an idle cluster did not answer a prompt of {outcome.num_prompt} tokens "
                    f"within {deadline_s:g} s"
                ) from error
            if outcome.end != "finished":
                raise ClusterError(f"an idle cluster did not serve a request: {outcome.error}")
            outcomes.append(outcome)
        return outcomes

    def _body(self, request: TimedRequest, salt: str) -> bytes:
        """Made before the run: encoding long prompts takes time."""
        return msgspec.json.encode(
            completion_body(self._model, request.prompt, request.num_output)
            | {
                "cache_salt": salt,
                "skip_special_tokens": False,  # else they would not be seen when they come
                "stream_options": {"include_usage": True},
            }
        )

    async def _send(self, body: bytes, outcome: Outcome, start_s: float) -> None:
        outcome.sent_s = time.perf_counter() - start_s
        try:
            async with self._session.post(
                f"{self._url}/v1/completions",
                data=body,
                headers={"Content-Type": "application/json"},
            ) as response:
                outcome.prefill_node = response.headers.get("x-pdserve-prefill-node", "")
                outcome.decode_node = response.headers.get("x-pdserve-decode-node", "")
                if response.status == 200:
                    await _read_stream(response.content, outcome, start_s)
                else:
                    outcome.end = "refused" if response.status == _REFUSED else "failed"
                    outcome.error = f"{response.status} {_error_in(await response.read())}"
        except aiohttp.ClientError as error:
            outcome.end, outcome.error = "failed", f"the connection broke: {error}"[:_SAID_CHARS]


@asynccontextmanager
async def open_loop_client(url: str, model: str) -> AsyncIterator[OpenLoopClient]:
    """A client for `model` of the cluster at `url`."""
    async with open_session() as session:
        yield OpenLoopClient(session, url, model)


async def _read_stream(stream: aiohttp.StreamReader, outcome: Outcome, start_s: float) -> None:
    """Note when each event comes; what is in them is looked at only in the end.

    The last two events are the count of tokens and the end mark. All others are one token each, or
    several of which the server had got behind; the count says how many there were in all.
    """
    partial = b""
    last: deque[bytes] = deque(maxlen=2)
    async for piece in stream.iter_any():
        now_s = time.perf_counter() - start_s
        *events, partial = (partial + piece).split(b"\n\n")
        for event in events:
            if event.startswith(_DATA):  # else it is a comment that keeps the stream open
                outcome.arrivals_s.append(now_s)
                last.append(event.removeprefix(_DATA))
        outcome.num_received = len(outcome.arrivals_s)
    if len(last) == 2 and last[1] == _DONE:
        del outcome.arrivals_s[-2:]
        outcome.num_received = _usage_in(last[0])
        as_asked = outcome.num_received == outcome.num_output
        outcome.end = "finished" if as_asked else "failed"
        outcome.error = "" if as_asked else f"the stream had {outcome.num_received} tokens"
        return
    error = _error_in(last[-1]) if last else ""
    if error:  # instead of a token
        outcome.arrivals_s.pop()
        outcome.num_received -= 1
    outcome.end, outcome.error = "failed", f"the stream broke off: {error or 'without a word'}"


class _Usage(msgspec.Struct):
    completion_tokens: int


class _UsageEvent(msgspec.Struct):
    usage: _Usage | None = None


class _Error(msgspec.Struct):
    message: str
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error | None = None


def _usage_in(event: bytes) -> int:
    """Tokens of the answer; 0 when the event does not say."""
    try:
        usage = msgspec.json.decode(event, type=_UsageEvent).usage
    except msgspec.DecodeError:
        return 0
    return usage.completion_tokens if usage is not None else 0


def _error_in(body: bytes) -> str:
    """The error's code, or its message if it has none; empty when there is none in it."""
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except msgspec.DecodeError:
        return ""
    return "" if error is None else (error.code or error.message)[:_SAID_CHARS]


def _nothing_yet(request: TimedRequest) -> Outcome:
    return Outcome(
        kind=request.kind,
        due_s=request.at_s,
        num_prompt=len(request.prompt),
        num_output=request.num_output,
    )


async def _tick(lags_s: list[float]) -> None:
    """Until cancelled."""
    while True:
        due_s = time.perf_counter() + _TICK_S
        await asyncio.sleep(_TICK_S)
        lags_s.append(time.perf_counter() - due_s)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Its pauses would be taken for the server's."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
