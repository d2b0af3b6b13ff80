"""A tier elsewhere: what it is asked, what the client sees, and what happens when it fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coordinator.external import endpoint
from coordinator.external.breaker import MOST_FAILURES
from coordinator.external.endpoint import Endpoint
from coordinator.models.cascade import Cascade
from coordinator.models.model import Catalog, make_model
from coordinator.tenants import Tenants
from coordinator.tenants.key_book import KeyBook
from coordinator.tenants.ledger import Ledger
from coordinator.tenants.report import read_usage
from pdserve.settings.access import hash_key
from pdserve.settings.cascades import Escalation, Tier
from pdserve.settings.external import ExternalEndpoint
from pdserve.settings.prices import Price
from pdserve.shared.clock import ManualClock, SystemClock
from pdserve.shared.errors import Overloaded
from tests.fakes.generator import FakeGenerator, tool_tokenizer
from tests.fakes.openai_server import (
    TOLD,
    OpenAiServer,
    Said,
    chunk,
    event,
    never,
    refuses,
    streams,
    whole,
)
from tests.unit.coordinator.api.harness import Harness, events_of, served
from tests.unit.coordinator.api.test_cascades import SMALL, sure

PRICE = Price(input=2.0, cached_input=1.0, output=8.0)


@dataclass
class Away:
    """A served cascade `auto` of a small model, which is unsure, and of a server elsewhere."""

    api: Harness
    cloud: OpenAiServer
    clock: ManualClock
    pauses: list[float]

    async def failed(self, status: int, **body: Any) -> Any:
        async with self.api.chat(**{"model": "auto"} | body) as response:
            assert response.status == status, await response.text()
            return (await response.json())["error"] | {"headers": response.headers}

    @property
    def outcomes(self) -> list[tuple[str, str]]:
        return [(model, outcome) for _, model, outcome in self.api.observer.tiers]


@asynccontextmanager
async def away(
    says: Sequence[Said] = (),
    tenants: Tenants | None = None,
    logprob: float = -9.0,
    key_file: str = "",
    timeout_s: float = 30.0,
) -> AsyncIterator[Away]:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    small = make_model(FakeGenerator(sure(SMALL, logprob)), tool_tokenizer(), ["small"])
    clock = ManualClock()
    async with OpenAiServer(list(says)).running() as cloud:
        described = ExternalEndpoint(
            url=cloud.url, model="large-1", key_file=key_file, timeout_s=timeout_s, price=PRICE
        )
        auto = Cascade(
            names=("auto",),
            created=0,
            tiers=(
                Tier(model="small", escalate=Escalation(min_logprob=-5.0)),
                Tier(external="cloud"),
            ),
            needs_whole_answer=True,
            endpoints={"cloud": Endpoint("cloud", described, clock, pause)},
        )
        async with served(catalog=Catalog([small], [auto]), tenants=tenants) as api:
            yield Away(api, cloud, clock, pauses)


async def test_it_answers_as_a_tier_and_is_on_the_bill(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-1\n")
    async with away(key_file=str(tmp_path / "key")) as two:
        asked = {"seed": 5, "temperature": 0.0, "slo_class": "standard", "user": "me"}
        async with two.api.chat(model="auto", **asked) as response:
            answer = await response.json()
        (body,) = two.cloud.bodies
        assert body == {
            "model": "large-1",
            "messages": [{"role": "user", "content": "Hi"}],
            "seed": 5,
            "temperature": 0.0,
        }
        assert two.cloud.keys == ["Bearer sk-1"]
        assert answer["model"] == "cloud"
        assert answer["id"].startswith("chatcmpl-")
        assert answer["choices"][0]["message"]["content"] == "From elsewhere"
        small, cloud = answer["usage"]["tiers"]
        assert (small["model"], small["completion_tokens"] > 0, "cost" in small) == (
            "small",
            True,
            False,
        )
        assert cloud == {
            "model": "cloud",
            "prompt_tokens": 12,
            "cached_tokens": 4,
            "completion_tokens": 3,
            "cost": pytest.approx((8 * 2 + 4 * 1 + 3 * 8) / 1e6),
        }
        assert two.outcomes == [("small", "min_logprob"), ("cloud", "answered")]
        (summary,) = two.api.observer.finished
        assert (summary.model, summary.num_prompt_tokens, summary.num_completion_tokens) == (
            "cloud",
            12,
            3,
        )
        assert summary.ttft_s is not None
        async with two.api.client.get("/v1/models/auto") as response:
            assert (await response.json())["external_tiers"] == ["cloud"]


async def test_an_answer_that_is_kept_here_asks_nobody() -> None:
    async with away(logprob=-0.1) as two:
        async with two.api.chat(model="auto") as response:
            assert (await response.json())["model"] == "small"
        assert two.cloud.bodies == []


@pytest.mark.parametrize("shows_usage", [True, False])
async def test_a_stream_is_passed_on_as_it_comes(shows_usage: bool) -> None:
    gate = asyncio.Event()
    pieces = [TOLD[0], b": alive\n\n", gate, *TOLD[1:]]
    options = {"stream_options": {"include_usage": True}} if shows_usage else {}
    async with (
        away([streams(*pieces)]) as two,
        two.api.chat(model="auto", stream=True, **options) as response,
    ):
        first = await response.content.readuntil(b"\n\n")
        assert not gate.is_set()
        gate.set()
        rest = await response.content.read()
        events = events_of(first + rest)
        assert two.cloud.bodies[0]["stream_options"] == {"include_usage": True}
    chunks = [e for e in events if isinstance(e, dict)]
    said = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
    assert said == "From elsewhere"
    assert {c["model"] for c in chunks} == {"cloud"}
    assert len({c["id"] for c in chunks}) == 1
    bills = [[tier["model"] for tier in c["usage"]["tiers"]] for c in chunks if "usage" in c]
    assert bills == [["small", "cloud"]] * shows_usage
    assert b"id: " not in first + rest
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_completions_go_there_as_text() -> None:
    choice = {"index": 0, "text": "From elsewhere", "finish_reason": "stop", "delta": None}
    async with away([whole(choices=[choice])]) as two:
        async with two.api.complete(model="auto", max_tokens=8) as response:
            assert (await response.json())["choices"] == [choice]
        assert two.cloud.bodies[0]["prompt"] == "Hi there"
        async with two.api.complete(model="auto", prompt=[[1, 2]], max_tokens=8) as response:
            assert (await response.json())["error"]["param"] == "prompt"
        for path, asked in (
            ("/v1/messages", {"max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}),
            ("/v1/responses", {"input": "Hi"}),
        ):
            async with two.api.client.post(path, json={"model": "auto"} | asked) as response:
                assert response.status == 400
                assert "use /v1/chat/completions or /v1/completions" in await response.text()
    assert len(two.cloud.bodies) == 1


async def test_what_it_would_not_understand_is_refused_by_name() -> None:
    async with away() as two:
        assert (await two.failed(400, top_k=3))["param"] == "top_k"
        assert two.cloud.bodies == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("trouble", [refuses(500), refuses(429, Retry_After="2"), refuses(503)])
async def test_trouble_that_passes_is_not_seen(trouble: Said, stream: bool) -> None:
    async with away([trouble, trouble]) as two:
        async with two.api.chat(model="auto", stream=stream) as response:
            assert "elsewhere" in await response.text()
        assert len(two.cloud.bodies) == 3
        assert two.pauses in ([0.25, 0.5], [2.0, 2.0])


@pytest.mark.parametrize(
    ("says", "status", "num_asked", "message"),
    [
        (refuses(500, "it burns"), 502, 3, "'cloud': status 500: it burns"),
        (refuses(429, "slow down", Retry_After="77"), 429, 1, "status 429: slow down"),
        (refuses(400, "too long"), 400, 1, "'cloud' refuses this call: status 400: too long"),
        (refuses(401, "bad key"), 502, 1, "'cloud': status 401: bad key"),
        (refuses(404, "no such model"), 502, 1, "'cloud': status 404: no such model"),
        (whole(model="other"), 502, 1, "it answered as the model 'other', not as 'large-1*'"),
        (whole(choices=[]), 502, 3, "cut off before its end"),
        (whole(choices=[{"index": 0}]), 502, 3, "without an index, or without content"),
        (whole(usage={"prompt_tokens": 1}), 502, 3, "a 'usage' without token counts"),
    ],
)
async def test_trouble_that_stays_is_told(
    says: Said, status: int, num_asked: int, message: str
) -> None:
    async with away([says] * 3) as two:
        error = await two.failed(status)
        assert message in error["message"]
        assert len(two.cloud.bodies) == num_asked
        assert two.outcomes == [("small", "min_logprob"), ("cloud", "failed")]
        if status == 429:
            assert error["headers"]["Retry-After"] == "77"


@pytest.mark.parametrize(
    ("pieces", "cut", "message"),
    [
        (TOLD[:2], True, "the connection failed"),
        (TOLD[:2], False, "cut off before its end"),
        ([TOLD[0], TOLD[-1]], False, "cut off before its end"),
        ([TOLD[0], b"data: {no\n\n"], False, "which is no JSON object"),
        ([TOLD[0], b"<html>\n"], False, "which is no server-sent event"),
        ([TOLD[0], event({"error": {"message": "it burns"}})], False, "it burns"),
        ([TOLD[0], chunk("x", model="other")], False, "answered as the model 'other'"),
    ],
)
async def test_a_stream_that_breaks_ends_with_an_error(
    pieces: Sequence[bytes], cut: bool, message: str
) -> None:
    """Nothing is asked again: never text of two answers in one."""
    async with (
        away([streams(*pieces, cut=cut)]) as two,
        two.api.chat(model="auto", stream=True) as response,
    ):
        text = await response.read()
    *_, failed, done = events_of(text)
    assert message in failed["error"]["message"]
    assert failed["error"]["code"] == "endpoint_failed"
    assert done == "data: [DONE]"
    assert text.count(b"From") == 1
    assert len(two.cloud.bodies) == 1
    assert two.outcomes[-1] == ("cloud", "failed")


async def test_silence_is_a_time_out_and_not_tried_again() -> None:
    async with away([never(), never()], timeout_s=0.05) as two:
        error = await two.failed(504)
        assert "'cloud' has said nothing for too long" in error["message"]
        async with two.api.chat({"X-Request-Timeout": "0.1"}, model="auto") as response:
            assert response.status == 504
    assert two.pauses == []
    assert len(two.cloud.bodies) <= 2  # a busy machine may be late to read the second


async def test_who_fails_again_and_again_is_left_alone() -> None:
    async with away([refuses(404)] + [refuses(500)] * MOST_FAILURES) as two:
        await two.failed(502)
        await two.failed(502)
        error = await two.failed(503)
        assert error["code"] == "endpoint_unavailable"
        assert error["headers"]["Retry-After"] == "1"
        assert len(two.cloud.bodies) == 1 + MOST_FAILURES
        two.clock.advance(1.0)
        async with two.api.chat(model="auto") as response:
            assert response.status == 200


async def test_a_long_answer_ends_the_trial_when_it_begins() -> None:
    long = streams(TOLD[0], asyncio.Event())
    async with away([*[refuses(500)] * MOST_FAILURES, long]) as two:
        await two.failed(502)
        await two.failed(503)
        two.clock.advance(1.0)
        async with two.api.chat(model="auto", stream=True) as response:
            await response.content.readuntil(b"\n\n")
            async with two.api.chat(model="auto") as other:
                assert other.status == 200


async def test_a_client_that_hangs_up_hangs_up_there() -> None:
    async with away([streams(TOLD[0], asyncio.Event())]) as two:
        async with two.api.chat(model="auto", stream=True) as response:
            await response.content.readuntil(b"\n\n")
        await two.api.observer.over.wait()
        (summary,) = two.api.observer.finished
        assert summary.error_code == "client_disconnected"
        assert summary.num_prompt_tokens > 0
    assert two.outcomes[-1] == ("cloud", "failed")


async def test_its_streams_are_not_resumed() -> None:
    async with away() as two:
        headers = {"Idempotency-Key": "k", "Last-Event-ID": "t5:3"}
        async with two.api.chat(headers, model="auto", stream=True) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, "Last-Event-ID")
            assert "what 'cloud' answers cannot be resumed" in error["message"]


async def test_text_of_a_tenant_leaves_only_if_it_may(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        f'[tenants.acme]\nkeys = ["{hash_key("a")}"]\n'
        f'[tenants.open]\nkeys = ["{hash_key("o")}"]\ntext_may_leave = true\n'
    )
    book = KeyBook(file, {}, ("standard",), SystemClock())
    tenants = Tenants(book, Ledger(tmp_path / "usage"), "small", SystemClock())
    async with away(tenants=tenants) as two:
        async with two.api.chat({"Authorization": "Bearer a"}, model="auto") as response:
            message = (await response.json())["error"]["message"]
            assert response.status == 403
            assert "text of 'acme' may not leave this cluster" in message
            assert "name another tier (small)" in message
        assert two.cloud.bodies == []
        async with two.api.chat({"Authorization": "Bearer o"}, model="auto") as response:
            assert response.status == 200
    tenants.close()
    cloud = next(row for row in read_usage(tmp_path / "usage", "model") if row.group == "cloud")
    assert (cloud.requests, cloud.prompt_tokens, cloud.cached_tokens, cloud.output_tokens) == (
        1,
        12,
        4,
        3,
    )
    assert json.dumps(two.cloud.bodies).count("Hi") == 1


async def test_nobody_has_all_places_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MOST_AT_A_TIME", 10)
    gate = asyncio.Event()
    answers = [streams(TOLD[0], gate)] * 10
    async with OpenAiServer(answers).running() as cloud, AsyncExitStack() as held:
        cloudy = Endpoint("cloud", ExternalEndpoint(url=cloud.url, model="large-1"))
        held.push_async_callback(cloudy.close)

        async def ask(tenant: str) -> None:
            body = {"messages": [], "stream": True}
            asked = cloudy.asked("/chat/completions", body, 1, tenant=tenant)
            await held.enter_async_context(asked)

        for _ in range(9):
            await ask("a")
        with pytest.raises(Overloaded, match="9 of 10 calls at a time are at 'cloud'"):
            await ask("a")
        await ask("b")
        with pytest.raises(Overloaded, match="10 of 10"):
            await ask("c")
