"""The page in a real browser, by its keyboard and its labels as people use it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import Client
from tests.cluster.fleet import Fleet

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium (the test extra)")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs Debian's packages chromium and chromium-driver"
)
WITHIN_S = 60.0
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1440,1000",
)


class Browser:
    """A Chromium with the page open. Its calls block, so they are made in a thread."""

    def __init__(self, profile: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = webdriver.ChromeService(DRIVER)
        self.driver = webdriver.Chrome(options=options, service=service)

    async def run(self, script: str, *arguments: object) -> Any:
        """What a script of the page returns."""
        return await asyncio.to_thread(self.driver.execute_script, script, *arguments)

    async def until(self, expression: str, is_so: Callable[[Any], bool] = bool) -> Any:
        """Wait until an expression of the page is so; its value."""
        observed = (
            "const done = arguments[0]; const look = () => {"
            f"const value = {expression}; if (value) done(value);"
            "else requestAnimationFrame(look); }; look();"
        )
        self.driver.set_script_timeout(WITHIN_S)
        value = await asyncio.to_thread(self.driver.execute_async_script, observed)
        assert is_so(value), f"{expression}: {value}"
        return value

    async def press(self, selector: str, keys: str) -> None:
        """Type into an element."""
        element = await asyncio.to_thread(self.driver.find_element, "css selector", selector)
        await asyncio.to_thread(element.send_keys, keys)

    def complaints(self) -> list[str]:
        """What the browser has to say, such as that something broke the page's policy."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.driver.quit()


@pytest_asyncio.fixture(loop_scope="session")
async def page(browser: Browser, fleet: Fleet) -> AsyncIterator[Browser]:
    """The page, live; nothing in it may have failed in the end."""
    await asyncio.to_thread(browser.driver.get, f"{fleet.url}/")
    await browser.until("document.querySelector('#live').classList.contains('on')")
    yield browser
    await asyncio.to_thread(browser.driver.get, "about:blank")  # nobody watches any more
    assert browser.complaints() == []


async def test_it_shows_the_cluster_and_what_becomes_of_requests(
    page: Browser, client: Client
) -> None:
    await page.until("document.querySelectorAll('#decode-nodes .node').length === 2")
    assert await page.run(
        "return [...document.querySelectorAll('.node')].map(n => n.querySelector('h4').textContent"
        " + ' ' + n.querySelector('.state span').textContent)"
    ) == ["prefill-0 ready", "decode-0 ready", "decode-1 ready"]
    assert await page.run("return document.querySelector('#serving').textContent") == "serving"
    output = await client.complete(make_prompt(600, "shown"), 20)
    newest = "document.querySelector('.journey .id')?.textContent"
    await page.until(f"{newest} === 'prefill-0 → {output.decode_node}'")
    await page.press(".journey > button", "\ue007")  # Enter
    lanes = "[...document.querySelectorAll('.way .lane b')].map(b => b.textContent)"
    assert await page.run(f"return {lanes}") == ["coordinator", "prefill-0", output.decode_node]
    rows = "[...document.querySelectorAll('.way tbody tr')].map(row => row.cells[0].textContent)"
    assert {"admission", "prefill", "decode"} <= set(await page.run(f"return {rows}"))
    ttft = "document.querySelector('.chart svg').getAttribute('aria-label')"
    assert "p50" in await page.until(f"{ttft}.includes('ms') && {ttft}")
    row = f"[...links.rows].find(row => row.cells[0].textContent === '{output.decode_node}')"
    expected = "tcp" if output.decode_node == "decode-1" else "shm"  # it has nothing else
    assert await page.until(f"{row}?.cells[2].textContent") == expected


async def test_the_playground_chats_and_says_who_served(page: Browser) -> None:
    await page.run("document.getElementById('max-tokens').value = 8")
    await page.press("#question", "Hello there\ue007")
    said = await page.until("document.querySelector('.measured')?.textContent")
    for measured in ("TTFT", "TPOT", "tokens 8", "served by prefill-0 → decode-"):
        assert measured in said
    await page.until(
        "(id => [...document.querySelectorAll('.journey')].some(j => j.dataset.key === id))"
        "(document.querySelector('.journey')?.dataset.key)"
    )


async def test_a_refusal_is_told_and_can_be_given_up(page: Browser) -> None:
    await page.until("document.querySelector('#prefill-nodes .drain')")
    await page.press("#prefill-nodes .drain", "\ue007")
    await page.until("document.querySelector('#action-dialog').open")
    await page.press("#action-do", "\ue007")
    error = "document.querySelector('#action-error')"
    assert "the only ready prefill node" in await page.until(
        f"!{error}.hidden && {error}.textContent"
    )
    assert not await page.run("return document.querySelector('#force-label').hidden")
    await page.press("#action-dialog", "\ue00c")  # Escape
    await page.until("!document.querySelector('#action-dialog').open")
    page.complaints()  # the browser notes an answer of 409


async def test_a_node_changes_pools_and_drains_by_the_keyboard(page: Browser, fleet: Fleet) -> None:
    def button(role: str, what: str) -> str:
        return f"#{role}-nodes [data-key='decode-1'] .{what}"

    for role, other in (("decode", "prefill"), ("prefill", "decode")):
        await page.until(f'document.querySelector("{button(role, "flip")}")')
        await page.press(button(role, "flip"), "\ue007")
        await page.press("#action-do", "\ue007")
        await page.until(f'document.querySelector("{button(other, "flip")}")')
        await page.until("!document.querySelector('#action-dialog').open")
    await page.press(button("decode", "drain"), "\ue007")
    await page.press("#action-do", "\ue007")
    await page.until(f'!document.querySelector("{button("decode", "drain")}")')
    await page.until(
        "document.querySelector('#announcer').textContent.includes('decode-1 is gone')"
    )
    await fleet.wait_gone("decode-1")
    while fleet.is_running("decode-1"):
        await asyncio.sleep(0.02)  # until its process has ended
    await fleet.restore()
    await fleet.wait_back()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_texts_have_enough_contrast(page: Browser, scheme: str) -> None:
    """At least 4.5 to 1 for each text that is shown, as WCAG AA wants it."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    await asyncio.to_thread(
        page.driver.execute_cdp_cmd, "Emulation.setEmulatedMedia", {"features": features}
    )
    assert await page.run(CONTRASTS) == []


async def test_a_narrow_screen_needs_no_scrolling_to_the_side(page: Browser) -> None:
    size = {"width": 360, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    command = "Emulation.setDeviceMetricsOverride"
    await asyncio.to_thread(page.driver.execute_cdp_cmd, command, size)
    wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert await page.run(wide) == 0
    await asyncio.to_thread(page.driver.execute_cdp_cmd, "Emulation.clearDeviceMetricsOverride", {})


CONTRASTS = """
const rgb = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
const light = ([r, g, b]) => {
  const part = (v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
};
const ground = (element) => {
  for (let e = element; e; e = e.parentElement) {
    const colour = rgb(getComputedStyle(e).backgroundColor);
    if (colour.length === 3 || colour[3] === 1) return colour;
  }
  return [255, 255, 255];
};
const found = [];
for (const element of document.querySelectorAll("main *, header *, footer *")) {
  const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  if (!own || !element.checkVisibility() || element.closest(":disabled, .unseen")) continue;
  const a = light(rgb(getComputedStyle(element).color)), b = light(ground(element));
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) found.push(`${element.tagName}.${element.className} ${ratio.toFixed(2)}`);
}
return [...new Set(found)];
"""
