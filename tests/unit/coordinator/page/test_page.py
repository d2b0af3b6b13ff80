"""What the page is told, by whom it may be read, and that it needs nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from coordinator.api import HttpServer, create_app
from coordinator.api.observer import RequestSummary
from coordinator.page.history import (
    GROWTH,
    MOST_LAST,
    MOST_PERIODS,
    MOST_SLOWEST,
    MOST_TENANTS,
    MOST_UNANSWERED,
    OTHERS,
    History,
    LoadLevel,
)
from coordinator.page.live import Live
from coordinator.page.routes import add_page_routes
from coordinator.page.told import Kept, News
from coordinator.requests.journey import Journey
from coordinator.tenants import Tenants
from coordinator.tenants.key_book import KeyBook
from pdserve.protocol import Slo
from pdserve.protocol.status import ClusterStatus, RoleName
from pdserve.settings.access import hash_key
from pdserve.shared.clock import ManualClock
from tests.fakes.generator import MODEL, tiny_catalog
from tests.fakes.statuses import node_status

KV_USED: dict[RoleName, float] = {"prefill": 0.0, "decode": 0.75}


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


def ended(request_id: str = "r", error: str = "", took_s: float = 3.0) -> Journey:
    journey = Journey(request_id, "chat", 7, received_s=1.0, started_s=1.5, tenant="acme")
    journey.sent("p", "d", 2.0, is_resumed=False)
    journey.ended_s, journey.error = 1.0 + took_s, error
    return journey


def milliseconds(buckets: dict[int, int]) -> list[int]:
    """The middles of buckets, each as often as it was observed."""
    return [
        round(GROWTH ** (bucket + 0.5))
        for bucket, count in sorted(buckets.items())
        for _ in range(count)
    ]


NOTHING: dict[str, Any] = {"num_completion_tokens": 0, "ttft_s": None, "tpot_s": None}


def test_a_period_sums_up_its_calls() -> None:
    history = History(ManualClock().now)
    for ttft_s in (0.05, 0.07, 0.2):
        history.call_ended(summary(ttft_s=ttft_s, num_cached_tokens=8))
    history.call_ended(summary(status=429, error_code="overloaded", **NOTHING))
    history.call_ended(summary(status=502, error_code="node_lost", **NOTHING))
    history.call_ended(summary(status=499, error_code="client_disconnected"))
    period = history.current(KV_USED)
    assert period.endings == {"answered": 3, "refused": 1, "failed": 1, "left": 1}
    assert period.errors == {"overloaded": 1, "node_lost": 1, "client_disconnected": 1}
    assert (period.prompt_tokens, period.cached_tokens, period.output_tokens) == (60, 24, 16)
    assert milliseconds(period.ttft) == [51, 51, 71, 199], "within 2.5 %"
    assert milliseconds(period.tpot) == [10, 10, 10, 10]
    assert period.promises == {"chat": Kept(kept=3, calls=6)}
    assert period.kv_used == KV_USED
    history.end_period(KV_USED)
    empty = history.current(KV_USED)
    assert (empty.endings, empty.errors, empty.ttft, empty.promises) == ({}, {}, {}, {})


@pytest.mark.parametrize("code", [400, 401, 403, 404, 408, 409, 413, 415, 422, 499])
def test_what_clients_do_wrong_is_no_failure(code: int) -> None:
    history = History()
    history.call_ended(summary(status=code, error_code="invalid_request", **NOTHING))
    (ending,) = history.current(KV_USED).endings
    assert ending == ("left" if code == 499 else "rejected")


def test_a_class_that_promises_nothing_keeps_no_promise() -> None:
    history = History()
    history.call_ended(summary(slo=Slo(name="standard")))
    assert history.current(KV_USED).promises == {}


def test_a_burst_between_two_looks_is_seen() -> None:
    clock = ManualClock()
    history = History(clock.now)
    clock.advance(1.0)
    history.load_changed(inflight=8, waiting=3)
    clock.advance(0.5)
    history.load_changed(inflight=0, waiting=0)
    clock.advance(0.5)
    period = history.current(KV_USED)
    assert (period.most_inflight, period.mean_inflight, period.most_waiting) == (8, 2.0, 3)
    assert period.seconds == 2.0
    history.end_period(KV_USED)
    assert history.current(KV_USED).most_inflight == 0


def test_a_level_begins_with_what_is_left() -> None:
    clock = ManualClock()
    level = LoadLevel(clock.now)
    level.set(5)
    level.restart()
    assert (level.most, level.mean()) == (5, 5.0)


def test_tenants_are_counted_and_bounded() -> None:
    history = History()
    for number in range(MOST_TENANTS + 7):
        history.call_ended(summary(tenant=f"t{number}"))
    tenants = history.current(KV_USED).tenants
    assert len(tenants) == MOST_TENANTS + 1
    assert tenants["t0"].endings == {"answered": 1}
    assert (tenants[OTHERS].endings, tenants[OTHERS].output_tokens) == ({"answered": 7}, 28)


def test_what_is_kept_is_bounded() -> None:
    history = History()
    history.journey_ended(ended("slow", took_s=60.0))
    history.journey_ended(ended("lost", "node_lost"))
    history.journey_ended(ended("typo", "invalid_request"))
    history.journey_ended(ended("gone", "request_cancelled"))
    for number in range(2 * MOST_PERIODS):
        history.journey_ended(ended(str(number)))
        history.end_period(KV_USED)
    assert len(history.periods) == MOST_PERIODS
    kept = {one.request_id: one for one in history.journeys_since(0)}
    assert len(kept) <= MOST_LAST + MOST_SLOWEST + MOST_UNANSWERED
    wanted = {"slow": "answered", "lost": "failed", "typo": "rejected", "gone": "left"}
    assert {name: kept[name].ending for name in wanted} == wanted
    assert history.journeys_since(history.num_journeys) == []
    history.journey_ended(ended("last"))
    (last,) = history.journeys_since(history.num_journeys - 1)
    assert (last.request_id, last.tenant) == ("last", "acme")
    assert [(step.name, step.start, step.end) for step in last.steps] == [
        ("admission", 0.0, 500.0),
        ("queue", 500.0, 1000.0),
        ("prefill", 1000.0, 3000.0),
    ]


async def metrics() -> bytes:
    return b"pdserve_up 1\n"


@asynccontextmanager
async def served(
    history: History,
    tenants: Tenants | None = None,
    told: Callable[[], ClusterStatus] = status,
    **pace: Any,
) -> AsyncIterator[aiohttp.ClientSession]:
    app = create_app(tiny_catalog(), tenants=tenants, metrics=metrics)
    live = Live(told, lambda: KV_USED, history, **pace)
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


async def test_who_watches_gets_everything_and_then_what_is_new() -> None:
    history = History()
    history.end_period(KV_USED)
    history.journey_ended(ended("before"))
    async with (
        served(history, news_s=0.02, num_per_period=2) as client,
        client.get("/admin/live") as response,
    ):
        assert response.content_type == "text/event-stream"
        first = await news(response)
        assert first.status == status()
        assert first.findings == [], "all is well"
        assert [one.request_id for one in first.journeys] == ["before"]
        assert len(first.periods) >= 1
        history.journey_ended(ended("after"))
        later = [await news(response) for _ in range(6)]
    assert [one.request_id for event in later for one in event.journeys] == ["after"]
    assert 2 <= sum(len(event.periods) for event in later) <= 4, "one for every other event"


async def test_what_doctor_would_say_is_told_too_worst_first() -> None:
    sick = msgspec.structs.replace(node_status("d", "decode"), state="sick", reason="rank_lost")
    told = msgspec.structs.replace(status(), nodes=[sick, *status().nodes[1:]], mode="colocated")
    async with (
        served(History(), told=lambda: told) as client,
        client.get("/admin/live") as response,
    ):
        found = (await news(response)).findings
    assert [one.level for one in found] == sorted(one.level for one in found)
    assert any("d is sick" in one.what and one.advice for one in found)


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
