"""The adapters of a cluster under faults: calls name them, and they come and go all the time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from time import monotonic
from typing import Final

import aiohttp

from pdserve.commands.bench.chaos.calls import Body
from pdserve.commands.bench.chaos.histories import Span
from pdserve.shared.errors import ClusterError

_PAUSES_S: Final = (0.1, 1.0)  # between two changes
_AGAIN_S: Final = 0.1
_LONGEST_S: Final = 120.0  # for a change to be made, whatever happens meanwhile
_LOADED: Final = "has already been loaded"
_DONE: Final = (200, 404)  # where what is unloaded is not there, a former try has unloaded it


@dataclass(slots=True)
class ChaosAdapters:
    """Names that stand for the same files whenever they stand for anything."""

    session: aiohttp.ClientSession
    url: str
    folders: Mapping[str, Path]  # by name
    random: Random
    absent: dict[str, list[Span]] = field(
        default_factory=dict
    )  # by name: when it may stand for none
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def load_all(self) -> str:
        """Load all of them; returns why they cannot be, or nothing.

        Raises:
            ClusterError: that takes too long.
        """
        for name in self.folders:
            status, said = await self._load(name)
            if status == 400:
                return said
            await self._until_done(self._load, name)
        return ""

    async def reload(self, while_it_loads: Callable[[], Awaitable[None]] | None = None) -> str:
        """Unload one and load it again, whatever happens meanwhile; returns its name.

        Raises:
            ClusterError: that takes too long.
        """
        async with self._turn:
            name, began_s = self.random.choice(list(self.folders)), monotonic()
            await self._until_done(self._unload, name)
            loading = asyncio.create_task(self._until_done(self._load, name))
            if while_it_loads is not None:
                await while_it_loads()
            await loading
            self.absent.setdefault(name, []).append((began_s, monotonic()))
            return name

    async def come_and_go(self, is_over: asyncio.Event) -> None:
        """Reload one after the other until that is set; all are loaded then. Raises as `reload`."""
        while not is_over.is_set():
            await self.reload()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.random.uniform(*_PAUSES_S)):
                    await is_over.wait()

    async def _until_done(
        self, change: Callable[[str], Awaitable[tuple[int, str]]], name: str
    ) -> None:
        status, said = 0, "no answer"
        try:
            async with asyncio.timeout(_LONGEST_S):
                while True:
                    with suppress(aiohttp.ClientError):
                        status, said = await change(name)
                    if status in _DONE or _LOADED in said:
                        return
                    await asyncio.sleep(_AGAIN_S)
        except TimeoutError:
            raise ClusterError(f"adapter {name} neither comes nor goes: {status} {said}") from None

    async def _load(self, name: str) -> tuple[int, str]:
        body = {"lora_name": name, "lora_path": str(self.folders[name])}
        return await self._post("load", body)

    async def _unload(self, name: str) -> tuple[int, str]:
        return await self._post("unload", {"lora_name": name})

    async def _post(self, what: str, body: Body) -> tuple[int, str]:
        address = f"{self.url}/v1/{what}_lora_adapter"
        async with self.session.post(address, json=body) as response:
            return response.status, await response.text()
