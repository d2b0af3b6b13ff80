"""GET /admin/record: each request as it ends, without its text, for `pdserve record`.

Prompts are told by their lengths and the ids of their blocks: hashes under a key that only this
recording has and nobody is told, so they say which prompts begin alike, and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from itertools import count
from secrets import token_bytes
from typing import Final

import msgspec
from aiohttp import web

from coordinator.api.answer.sse import KEEP_ALIVE, framed
from coordinator.api.calls import events
from coordinator.api.context import ApiContext
from coordinator.api.openapi.operation import EVENTS, Operation
from coordinator.api.routes import add_routes
from coordinator.prefixes.index import PromptHashes
from coordinator.requests.journey import Journey
from pdserve.measured.trace_lines import TraceHeader, TraceLine
from pdserve.shared.clock import Clock, SystemClock
from pdserve.shared.errors import Overloaded

BLOCK_TOKENS: Final = 64
MOST_RECORDINGS: Final = 4  # at a time
MOST_UNREAD: Final = 4096  # requests; a client that reads nothing for so long is left
_ID_BYTES = 6
_ALIVE_S = 15.0  # between two signs of life while there are no requests


@dataclass(slots=True, eq=False)
class RequestRecording:
    """One client that records."""

    began_s: float
    key: bytes = field(default_factory=lambda: token_bytes(16))
    numbers: count[int] = field(default_factory=count)
    lines: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)

    def tell(self, journey: Journey, prompt: PromptHashes) -> None:
        """Tell of a request that has ended."""
        if journey.received_s < self.began_s or self.lines.qsize() > MOST_UNREAD:
            return
        chain = prompt.chain(BLOCK_TOKENS)
        line = TraceLine(
            id=next(self.numbers),
            timestamp=round((journey.received_s - self.began_s) * 1e3, 1),
            input_length=journey.num_prompt_tokens,
            output_length=journey.num_tokens,
            hash_ids=[self._id_of(block) for block in chain.known(chain.num_blocks)],
            slo_class=journey.slo_class,
            took_s=round((journey.ended_s or journey.received_s) - journey.received_s, 4),
            error=journey.error,
        )
        self.lines.put_nowait(framed(msgspec.json.encode(line)))

    def _id_of(self, block: bytes) -> int:
        return int.from_bytes(blake2b(block, digest_size=_ID_BYTES, key=self.key).digest())


class Recordings:
    """Who records at the moment. Costs nothing while nobody does."""

    def __init__(self, model: str, clock: Clock | None = None) -> None:
        self._model = model
        self._clock = clock or SystemClock()
        self.running: Final[set[RequestRecording]] = set()

    async def record(self, context: ApiContext) -> AsyncGenerator[bytes]:
        """GET /admin/record: a TraceHeader, and then a TraceLine for each request, as it ends."""
        if len(self.running) >= MOST_RECORDINGS:
            raise Overloaded(f"{MOST_RECORDINGS} clients record already: end one of them")
        started = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds")
        header = TraceHeader(block_tokens=BLOCK_TOKENS, model=self._model, started=started)
        recording = RequestRecording(self._clock.now())
        self.running.add(recording)
        try:
            yield framed(msgspec.json.encode(header))
            while not context.tasks.is_draining and recording.lines.qsize() <= MOST_UNREAD:
                try:
                    async with asyncio.timeout(_ALIVE_S):
                        line = await recording.lines.get()
                except TimeoutError:
                    yield KEEP_ALIVE
                else:
                    yield line
        finally:
            self.running.discard(recording)


_RECORD = Operation(
    method="get",
    path="/admin/record",
    name="recordRequests",
    tag="Cluster",
    summary="Record requests as they end: times, lengths and shared prefixes, no text.",
    media=EVENTS,
    events=TraceLine,
    errors=(401, 403, 429),
)


def add_record_route(app: web.Application, recordings: Recordings) -> None:
    """Serve it. If API keys are in use, that takes an operator's key."""
    record = events(recordings.record)
    add_routes(app, [web.get("/admin/record", record, allow_head=False)], [_RECORD])
