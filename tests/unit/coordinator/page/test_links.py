"""The page's links to what needs a key, in a real browser (over the DevTools protocol)."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from coordinator.page.history import History
from coordinator.tenants import Tenants
from coordinator.tenants.key_book import KeyBook
from pdserve.shared.clock import ManualClock
from tests.fakes.generator import MODEL
from tests.unit.coordinator.page.test_page import KEYS, served

CHROMIUM = shutil.which("chromium")
WITHIN_S = 30.0
ARGUMENTS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
             "--disable-background-networking", "--remote-debugging-port=0")  # fmt: skip


class Tabs:
    """The tabs of a browser, by its protocol."""

    def __init__(self, client: aiohttp.ClientSession, address: str) -> None:
        self._client = client
        self._address = address
        self._ids = count(1)

    async def all(self) -> list[dict[str, str]]:
        async with self._client.get(f"http://{self._address}/json/list") as response:
            tabs: list[dict[str, str]] = await response.json()
        return [tab for tab in tabs if tab["type"] == "page"]

    async def run(self, tab: dict[str, str], script: str) -> Any:
        """What an expression of a tab is, as its user does it."""
        params = {"expression": script, "userGesture": True, "awaitPromise": True}
        asked = {"id": next(self._ids), "method": "Runtime.evaluate", "params": params}
        async with self._client.ws_connect(tab["webSocketDebuggerUrl"]) as socket:
            await socket.send_json(asked)
            answer = await socket.receive_json(timeout=WITHIN_S)
        return answer["result"]["result"].get("value")

    async def until(self, tab: dict[str, str], script: str) -> Any:
        while not (value := await self.run(tab, script)):
            await asyncio.sleep(0.02)
        return value


@asynccontextmanager
async def chromium(profile: Path, url: str) -> AsyncIterator[Tabs]:
    """A browser that shows this page."""
    port = profile / "DevToolsActivePort"
    process = await asyncio.create_subprocess_exec(
        str(CHROMIUM), *ARGUMENTS, f"--user-data-dir={profile}", url,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(WITHIN_S), aiohttp.ClientSession() as client:
            while not port.exists() or "\n" not in port.read_text():
                await asyncio.sleep(0.02)
            yield Tabs(client, f"127.0.0.1:{port.read_text().splitlines()[0]}")
    finally:
        process.kill()
        await process.wait()


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("has_keys", [True, False])
async def test_links_are_followed_with_the_key_of_the_page(tmp_path: Path, has_keys: bool) -> None:
    file, clock = tmp_path / "keys.toml", ManualClock()
    file.write_text(KEYS)
    tenants = Tenants(KeyBook(file, {}, ("standard",), clock), None, MODEL, clock)
    async with (
        served(History(), tenants if has_keys else None) as client,
        client.get("/") as answer,
        chromium(tmp_path / "profile", str(answer.url)) as tabs,
    ):
        (page,) = await tabs.all()

        async def shown(link: str) -> str:
            before = {tab["id"] for tab in await tabs.all()}
            await tabs.run(page, f"document.querySelector('a[href={link}]').click()")
            if not has_keys:
                text = await tabs.until(
                    page, "!document.querySelector('a') && document.body.innerText"
                )
                await tabs.run(page, "history.back()")
                await tabs.until(page, "!!document.querySelector('#live.on')")
                return str(text)
            while not (new := [t for t in await tabs.all() if t["id"] not in before]):
                await asyncio.sleep(0.02)
            return str(await tabs.until(new[0], "document.body?.innerText"))

        if has_keys:
            await tabs.until(page, "document.getElementById('key-dialog')?.open")
            await tabs.run(page, "document.getElementById('key').value = 'boss'")
            await tabs.run(page, "document.querySelector('#key-form button').click()")
        await tabs.until(page, "!!document.querySelector('#live.on')")
        assert "pdserve_up 1" in await shown("metrics")
        assert '"nodes"' in await shown("status")
