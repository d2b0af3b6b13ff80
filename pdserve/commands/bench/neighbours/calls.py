"""What an attacker sends: calls that are read to their end, left early, or never finished."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from pdserve.commands.bench.load.client import PLAIN_IDS, sharing

_TRICKLE_S = 0.5
_UNDER_WAY = ("validating", "in_progress", "finalizing")


@dataclass(slots=True)
class Attacker:
    """A tenant's way to one coordinator, and what became of its calls."""

    session: aiohttp.ClientSession  # with its key
    url: str
    model: str
    max_model_len: int  # tokens
    ends: Counter[str] = field(default_factory=Counter)  # by HTTP status, or what ended them

    def terms(self, number: int) -> dict[str, Any]:
        """Return the fields of a call that shares its prefix with no other number's."""
        return {"model": self.model} | sharing(str(number))

    async def post(self, path: str, body: dict[str, Any] | bytes) -> None:
        """Send a call, and read all of its answer."""
        await self._post(path, body)

    async def batch(self, path: str, bodies: Iterable[dict[str, Any]]) -> None:
        """Have a file of calls answered by a batch, and see it end."""
        lines = (
            {"custom_id": str(i), "method": "POST", "url": path, "body": body}
            for i, body in enumerate(bodies)
        )
        file = await self._file(b"\n".join(map(msgspec.json.encode, lines)))
        made = {"input_file_id": file["id"], "endpoint": path, "completion_window": "24h"}
        batch = await self._made("/v1/batches", json=made)
        while batch["status"] in _UNDER_WAY:
            await asyncio.sleep(_TRICKLE_S)
            async with self.session.get(f"{self.url}/v1/batches/{batch['id']}") as response:
                batch = await response.json()
        self.ends[f"batch {batch['status']}"] += 1

    async def file(self, content: bytes) -> None:
        """Store a file, and delete it."""
        file = await self._file(content)
        async with self.session.delete(f"{self.url}/v1/files/{file['id']}") as response:
            await self._read(response)

    async def leave(self, path: str, body: dict[str, Any], after_s: float) -> None:
        """Send a call, and close the connection after that time."""
        try:
            async with asyncio.timeout(after_s):
                await self._post(path, body)
        except TimeoutError:
            self.ends["left"] += 1

    async def get(self, path: str) -> None:
        """Read a page."""
        async with self.session.get(self.url + path) as response:
            await self._read(response)

    async def frames(self, messages: list[str]) -> None:
        """Send messages over a WebSocket that offers compression, reading nothing until the end."""
        async with self.session.ws_connect(f"{self.url}/v1/responses", compress=15) as socket:
            with suppress(ConnectionError):
                for message in messages:
                    await socket.send_str(message)
            with suppress(TimeoutError):
                async with asyncio.timeout(_TRICKLE_S):
                    async for _ in socket:
                        pass
        self.ends["socket"] += 1

    async def unfinished(self, num_bytes: int, announced: int, key: str) -> None:
        """Announce a body, send its beginning and then a byte now and then, for ever."""
        where = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\n"
            f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {announced}\r\n\r\n"
        )
        ended = asyncio.create_task(reader.read(1))
        try:
            writer.write(head.encode() + b" " * num_bytes)
            while not ended.done():
                await writer.drain()
                await asyncio.wait((ended,), timeout=_TRICKLE_S)
                writer.write(b" ")
            self.ends["unfinished"] += 1
        finally:
            ended.cancel()
            writer.close()

    async def hold(self) -> None:
        """Open a connection and say nothing until the coordinator closes it."""
        where = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        try:
            await reader.read(1)
            self.ends["closed"] += 1
        finally:
            writer.close()

    def ids(self, count: int, number: int) -> list[int]:
        """A prompt that nobody has sent before, if `number` was not used before."""
        first = [PLAIN_IDS[(number >> shift) % len(PLAIN_IDS)] for shift in (0, 7, 14)]
        return (first + [PLAIN_IDS[i % len(PLAIN_IDS)] for i in range(count)])[:count]

    async def _file(self, content: bytes) -> dict[str, Any]:
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", content, filename="calls.jsonl")
        return await self._made("/v1/files", data=form)

    async def _made(self, path: str, **fields: Any) -> dict[str, Any]:
        async with self.session.post(self.url + path, **fields) as response:
            self.ends[str(response.status)] += 1
            response.raise_for_status()
            made: dict[str, Any] = await response.json()
            return made

    async def _post(self, path: str, body: dict[str, Any] | bytes) -> None:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        async with self.session.post(
            self.url + path, data=data, headers={"Content-Type": "application/json"}
        ) as response:
            await self._read(response)

    async def _read(self, response: aiohttp.ClientResponse) -> None:
        async for _ in response.content.iter_any():
            pass
        self.ends[str(response.status)] += 1
