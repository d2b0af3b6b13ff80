"""What the page is told, by whom it may be read, and that it needs nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from coordinator.api import HttpServer, create_app
from coordinator.api.observer import RequestSummary
from coordinator.page import live as live_module
from coordinator.page.history import MOST_JOURNEYS, MOST_PERIODS, History, Kept
from coordinator.page.live import Live, News
from coordinator.page.routes import add_page_routes
from coordinator.requests.journey import Journey
from coordinator.tenants import Tenants
from coordinator.tenants.key_book import KeyBook
from coordinator.tenants.keys import hash_key
from pdserve.clock import ManualClock
from pdserve.protocol import Slo
from pdserve.protocol.status import ClusterStatus
from tests.unit.coordinator.api.fakes import MODEL, FakeGenerator, node_status, tiny_tokenizer


def status() -> ClusterStatus:
    nodes = [node_status("d", "decode"), node_status("p", "prefill")]
    nodes[0] = msgspec.structs.replace(nodes[0], free_blocks=25, queued_tokens=3)
    return ClusterStatus(model="m", mode="adaptive", ready=True, inflight=2, waiting=1, nodes=nodes)


def summary(**changes: Any) -> RequestSummary:
    fields: dict[str, Any] = {
        "request_id": "r",
        "endpoint": "/v1/completions",
        "slo": Slo(name="chat", ttft_s=0.1),
        "is_streaming": True,
        "status": 200,
        "error_code": None,
        "finish_reason": "stop",
        "num_prompt_tokens": 10,
        "num_cached_tokens": 0,
        "num_completion_tokens": 4,
        "e2e_s": 1.0,
        "ttft_s": 0.05,
        "tpot_s": 0.01,
    }
    return RequestSummary(**(fields | changes))


def ended(request_id: str = "r") -> Journey:
    journey = Journey(request_id, "chat", 7, received_s=1.0, started_s=1.5)
    journey.sent("p", "d", 2.0, is_resumed=False)
    journey.ended_s = 4.0
    return journey


def test_a_period_sums_up_its_calls() -> None:
    history = History()
    for ttft_s in (0.05, 0.07, 0.2):
        history.call_ended(summary(ttft_s=ttft_s))
    refusal = {"num_completion_tokens": 0, "ttft_s": None, "tpot_s": None}
    history.call_ended(summary(status=429, error_code="overloaded", **refusal))
    history.call_ended(summary(status=502, error_code="node_lost", **refusal))
    history.call_ended(summary(status=499, error_code="client_disconnected"))
    period = history.current(status())
    assert (period.calls, period.refused, period.failed) == (6, 1, 1)
    assert (period.prompt_tokens, period.output_tokens) == (60, 16)
    assert (period.ttft_p50, period.ttft_p99, period.tpot_p50) == (70.0, 200.0, 10.0)
    assert period.promises == {"chat": Kept(kept=3, calls=6)}
    assert (period.inflight, period.waiting, period.queued_tokens) == (2, 1, 3)
    assert period.kv_used == {"prefill": 0.0, "decode": 0.75}
    history.end_period(status())
    empty = history.current(status())
    assert (empty.calls, empty.ttft_p50, empty.promises) == (0, None, {})


def test_what_is_kept_is_bounded() -> None:
    history = History()
    for number in range(3 * MOST_PERIODS):
        for _ in range(7):
            history.call_ended(summary())
            history.journey_ended(ended(str(number)))
        history.end_period(status())
    assert len(history.periods) == MOST_PERIODS
    assert len(history.journeys_since(0)) == MOST_JOURNEYS
    assert history.journeys_since(history.num_journeys) == []
    history.journey_ended(ended("last"))
    (last,) = history.journeys_since(history.num_journeys - 1)
    assert [(step.name, step.start, step.end) for step in last.steps] == [
        ("admission", 0.0, 500.0),
        ("queue", 500.0, 1000.0),
        ("prefill", 1000.0, 3000.0),
    ]


@asynccontextmanager
async def served(
    history: History, tenants: Tenants | None = None
) -> AsyncIterator[aiohttp.ClientSession]:
    app = create_app(FakeGenerator(), tiny_tokenizer(), [MODEL], tenants=tenants)
    live = Live(status, history)
    add_page_routes(app, live)
    timeout = aiohttp.ClientTimeout(total=30)
    async with (
        live.running(),
        HttpServer(app) as server,
        aiohttp.ClientSession(server.url, timeout=timeout) as client,
    ):
        yield client


async def news(response: aiohttp.ClientResponse) -> News:
    data = (await response.content.readuntil(b"\n\n")).strip().removeprefix(b"data: ")
    return msgspec.json.decode(data, type=News)


async def test_who_watches_gets_everything_and_then_what_is_new(monkeypatch: Any) -> None:
    monkeypatch.setattr(live_module, "NEWS_S", 0.02)
    monkeypatch.setattr(live_module, "PERIOD_S", 0.04)
    history = History()
    history.end_period(status())
    history.journey_ended(ended("before"))
    async with served(history) as client, client.get("/admin/live") as response:
        assert response.content_type == "text/event-stream"
        first = await news(response)
        assert first.status == status()
        assert [one.request_id for one in first.journeys] == ["before"]
        assert len(first.periods) >= 1
        history.journey_ended(ended("after"))
        later = [await news(response) for _ in range(6)]
    assert [one.request_id for event in later for one in event.journeys] == ["after"]
    assert 2 <= sum(len(event.periods) for event in later) <= 4, "one for every other event"


KEYS = f"""
[tenants.boss]
keys = ["{hash_key("boss")}"]
is_operator = true

[tenants.user]
keys = ["{hash_key("user")}"]
"""


async def test_with_keys_the_cluster_is_shown_to_operators_only(tmp_path: Path) -> None:
    file, clock = tmp_path / "keys.toml", ManualClock()
    file.write_text(KEYS)
    tenants = Tenants(KeyBook(file, {}, ("standard",), clock), None, MODEL, clock)
    async with served(History(), tenants) as client:
        async with client.get("/") as page:
            assert page.status == 200, "it has no secrets"
        for key, expected in (("", 401), ("wrong", 401), ("user", 403), ("boss", 200)):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            async with client.get("/admin/live", headers=headers) as response:
                assert response.status == expected, key


async def test_the_page_is_one_document_that_may_load_nothing_else() -> None:
    async with served(History()) as client, client.get("/") as response:
        page, policy = await response.text(), response.headers["Content-Security-Policy"]
        assert response.content_type == "text/html"
    assert re.findall(r"(?:src|href)=\"(?!data:|#|docs|metrics|status)[^\"]*\"|@import", page) == []
    assert re.findall(r"https?://(?!www\.w3\.org/)", page) == []
    for kind in ("style", "script"):
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
