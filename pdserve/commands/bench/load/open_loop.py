"""An open-loop client: sends requests when they are due, whatever happens to earlier ones.

A closed loop waits for a slow server, and so measures only the load that the server can handle.
Here a server that falls behind gets the same arrivals as one that does not. The client's own lag is
measured as well, at every request and by a clock that ticks beside them: results are valid only
while this lag is small.

The same client can run a closed loop: a number of streams that each send the next request when one
has ended. It shows what a server does at exactly this concurrency.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from math import inf

import aiohttp
import msgspec

from pdserve.commands.bench.load.client import completion_body, open_session, sharing
from pdserve.commands.bench.load.client_run import Run, timed
from pdserve.commands.bench.load.completion_stream import SAID_CHARS, error_in, read_stream
from pdserve.commands.bench.load.outcome import Outcome
from pdserve.commands.bench.load.workload import TimedRequest
from pdserve.shared.errors import ClusterError

_REFUSED = 429
_WORDS = ("the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "as", "was", "with", "be")


class OpenLoopClient:
    """Sends timed requests to one server."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, *, sends_text: bool = False
    ) -> None:
        """Send to this server; `sends_text`: a word per token, for servers without token ids."""
        self._session = session
        self._url = url
        self._model = model
        self._sends_text = sends_text

    async def run(
        self,
        requests: Sequence[TimedRequest],
        salt: str,
        drain_s: float,
        *,
        asks_ids: bool = False,
        stop_s: float = inf,
    ) -> Run:
        """Send each request when it is due, and wait up to `drain_s` after the last one is due.

        A request that comes after another one is due its time to think after that one's end.

        Args:
            requests: by time; those that come after another one right behind it.
            salt: prefixes are shared only between requests of one salt, so not between runs.
            drain_s: after this time, running requests are cancelled and stay "unfinished".
            asks_ids: answers are also known by their token ids, of servers that tell them.
            stop_s: requests that come after others are not sent later than this, and those that
                are not sent are no part of the run.
        """
        bodies = [self._body(request, salt, asks_ids=asks_ids) for request in requests]
        outcomes = [_nothing_yet(request) for request in requests]
        followers = _followers(requests)
        sending: set[asyncio.Task[None]] = set()
        async with timed() as timer, _ended(sending):
            start_s = timer.start_s

            async def send(index: int) -> None:
                """Send a request, and then those that come after it."""
                await self._send(bodies[index], outcomes[index], start_s)
                await asyncio.gather(*map(think, followers.get(index, ())))

            async def think(index: int) -> None:
                think_s = requests[index].think_s
                if time.perf_counter() - start_s + think_s > stop_s:
                    return
                await asyncio.sleep(think_s)
                outcomes[index].due_s = time.perf_counter() - start_s
                await send(index)

            for index, request in enumerate(requests):
                if request.after is None:
                    await asyncio.sleep(start_s + request.at_s - time.perf_counter())
                    sending.add(asyncio.create_task(send(index)))
            left_s = max(0.0, start_s + stop_s - time.perf_counter()) + drain_s
            await asyncio.wait(sending, timeout=min(left_s, longest_s(requests, drain_s)))
        if stop_s < inf:
            pairs = zip(requests, outcomes, strict=True)
            outcomes = [o for request, o in pairs if request.after is None or o.sent_s]
        return timer.run_of(outcomes)

    async def run_closed(
        self, requests: Sequence[TimedRequest], salt: str, concurrency: int, limit_s: float
    ) -> Run:
        """Send `concurrency` requests, and another one whenever one has ended.

        A request is due when its turn has come.

        Args:
            requests: in this order.
            salt: as `run`.
            concurrency: number of concurrent requests.
            limit_s: after this time, running requests are cancelled and no more are sent; all of
                them are "unfinished".
        """
        bodies = [self._body(request, salt) for request in requests]
        outcomes = [_nothing_yet(request) for request in requests]
        left = iter(zip(bodies, outcomes, strict=True))
        streams: set[asyncio.Task[None]] = set()
        async with timed() as timer, _ended(streams):
            start_s = timer.start_s

            async def one_after_another() -> None:
                for body, outcome in left:
                    outcome.due_s = time.perf_counter() - start_s
                    await self._send(body, outcome, start_s)

            streams |= {asyncio.create_task(one_after_another()) for _ in range(concurrency)}
            await asyncio.wait(streams, timeout=limit_s)
        return timer.run_of(outcomes)

    async def one_by_one(
        self, requests: Sequence[TimedRequest], salt: str, deadline_s: float
    ) -> list[Outcome]:
        """Send each request when the previous one has ended, as on an idle cluster.

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

    def _body(self, request: TimedRequest, salt: str, *, asks_ids: bool = False) -> bytes:
        """Encode a request before the run, since encoding long prompts takes time."""
        return msgspec.json.encode(
            completion_body(request.model or self._model, request.prompt, request.num_output)
            | ({"prompt": as_text(request.prompt)} if self._sends_text else {})
            | sharing(salt)
            | ({"return_token_ids": True} if asks_ids else {})
            | {
                "skip_special_tokens": False,  # otherwise their arrival would not be visible
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
                    await read_stream(response.content, outcome, start_s)
                else:
                    outcome.end = "refused" if response.status == _REFUSED else "failed"
                    outcome.error = f"{response.status} {error_in(await response.read())}"
        except aiohttp.ClientError as error:
            outcome.end, outcome.error = "failed", f"the connection broke: {error}"[:SAID_CHARS]


@asynccontextmanager
async def open_loop_client(
    url: str, model: str, *, sends_text: bool = False
) -> AsyncIterator[OpenLoopClient]:
    """Yield a client for `model` of the server at `url`; see OpenLoopClient."""
    async with open_session() as session:
        yield OpenLoopClient(session, url, model, sends_text=sends_text)


def as_text(prompt: Sequence[int]) -> str:
    """Return as many words as there are ids, the same for the same ids."""
    return " ".join(_WORDS[token_id % len(_WORDS)] for token_id in prompt)


def _followers(requests: Sequence[TimedRequest]) -> dict[int, list[int]]:
    """Return the indices of the requests that come after each one."""
    found: dict[int, list[int]] = {}
    for index, request in enumerate(requests):
        if request.after is not None:
            found.setdefault(request.after, []).append(index)
    return found


def longest_s(requests: Sequence[TimedRequest], each_s: float) -> float:
    """Return how long a conversation may take, with `each_s` for each of its requests."""
    taken_s: list[float] = []
    for request in requests:
        before_s = 0.0 if request.after is None else taken_s[request.after] + request.think_s
        taken_s.append(before_s + each_s)
    return max(taken_s, default=each_s)


def _nothing_yet(request: TimedRequest) -> Outcome:
    return Outcome(
        kind=request.kind,
        due_s=request.at_s,
        num_prompt=len(request.prompt),
        num_output=request.num_output,
    )


@asynccontextmanager
async def _ended(tasks: set[asyncio.Task[None]]) -> AsyncIterator[None]:
    """Cancel the tasks at the end, and wait for them; raise the error of one that failed."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()
