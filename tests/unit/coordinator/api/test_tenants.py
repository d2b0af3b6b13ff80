"""API keys at the door: who may come in, as which class, how often, and what is written down."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.generation import GenerationRequest, Route
from coordinator.tenants import Readers, Tenants
from coordinator.tenants.key_book import KeyBook
from coordinator.tenants.ledger import Ledger
from coordinator.tenants.opening import open_tenants
from coordinator.tenants.report import read_usage
from pdserve.settings.access import hash_key
from pdserve.settings.config import CoordinatorConfig
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import ConfigError, NodeLost, Overloaded
from tests.fakes.generator import MODEL, FakeGenerator, Pause, Step, Tokens, says
from tests.matrix import matrix
from tests.unit.coordinator.api.harness import Harness, is_error_body, served
from tests.unit.coordinator.api.raw_client import connected

CLASSES = ("interactive", "standard", "batch")
FILE = f"""
[tenants.acme]
keys = ["{hash_key("acme-1")}", "{hash_key("acme-2")}"]
requests_per_minute = 3
tokens_per_minute = 1000
weight = 2.0

[tenants.nightly]
keys = ["{hash_key("night")}"]
classes = ["batch"]
default_class = "batch"

[tenants.friend]
keys = ["{hash_key("friend")}"]
cache_group = "acme"
is_operator = true
"""


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def usage(tmp_path: Path) -> Path:
    return tmp_path / "usage.sqlite"


@pytest.fixture
def tenants(tmp_path: Path, usage: Path, clock: ManualClock) -> Iterator[Tenants]:
    file = tmp_path / "keys.toml"
    file.write_text(FILE)
    found = Tenants(KeyBook(file, {}, CLASSES, clock), Ledger(usage), MODEL, clock)
    yield found
    found.close()


@pytest.mark.parametrize(
    "headers", [{}, bearer(""), bearer("nobody"), {"Authorization": "Basic acme-1"}]
)
@pytest.mark.parametrize(
    "path", matrix(["/v1/models", "/v1/chat/completions", "/v1/nothing", "/admin/x"], 2)
)
async def test_without_a_key_nobody_gets_in(
    tenants: Tenants, headers: dict[str, str], path: str
) -> None:
    async with (
        served(tenants=tenants) as api,
        api.client.request("POST" if "chat" in path else "GET", path, headers=headers) as response,
    ):
        assert response.status == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        body = await response.json()
    assert is_error_body(body)
    assert body["error"]["code"] == "invalid_api_key"
    assert api.generator.generations == []


async def test_a_request_is_its_tenants(tenants: Tenants) -> None:
    async with served(tenants=tenants) as api:
        seen = {}
        for key in ("acme-1", "acme-2", "night", "friend"):
            async with api.chat(bearer(key), cache_salt="s") as response:
                assert response.status == 200
            seen[key] = api.generator.last.request
    slo = seen["acme-1"].slo
    assert (slo.name, slo.tenant, slo.weight) == ("standard", "acme", 2.0)
    assert seen["night"].slo.name == "batch"
    salts = {key: request.prompt.cache_salt for key, request in seen.items()}
    assert salts["acme-1"] == salts["acme-2"] == salts["friend"] != salts["night"]


async def test_salts_of_two_tenants_never_meet(tenants: Tenants) -> None:
    async with served(tenants=tenants) as api:
        salts = set()
        for key, salt in (("acme-1", "x"), ("acme-1", None), ("night", "x"), ("night", "4:acme:x")):
            async with api.chat(bearer(key), cache_salt=salt) as response:
                assert response.status == 200
            salts.add(api.generator.last.request.prompt.cache_salt)
    assert len(salts) == 4


async def test_a_class_may_be_closed_to_a_tenant(tenants: Tenants) -> None:
    async with (
        served(tenants=tenants) as api,
        api.chat(bearer("night"), slo_class="interactive") as response,
    ):
        body = await response.json()
        assert response.status == 403
    assert is_error_body(body)
    assert "batch" in body["error"]["message"]


async def test_requests_run_out_and_come_back(tenants: Tenants, clock: ManualClock) -> None:
    async with served(tenants=tenants) as api:
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", {"model": MODEL, "prompt": "x"}),
            ("/tokenize", {"prompt": "x"}),
            ("/v1/responses/input_tokens", {"model": MODEL, "input": "x"}),
        ]
        for left, (path, body) in zip((2, 1, 0), bodies, strict=True):
            async with api.client.post(path, json=body, headers=bearer("acme-1")) as response:
                assert response.status == 200
                assert response.headers["x-ratelimit-limit-requests"] == "3"
                assert response.headers["x-ratelimit-remaining-requests"] == str(left)
        async with api.chat(bearer("acme-2")) as response:
            body = await response.json()
            assert response.status == 429
            assert response.headers["Retry-After"] == "20"
            assert response.headers["x-ratelimit-remaining-requests"] == "0"
        for path in ("/tokenize", "/detokenize", "/v1/responses/input_tokens"):
            async with api.client.post(path, json={}, headers=bearer("acme-1")) as response:
                assert response.status == 429, path
        assert body["error"]["code"] == "rate_limit_exceeded"
        async with api.chat(bearer("friend")) as response:
            assert response.status == 200
            assert "x-ratelimit-limit-requests" not in response.headers
        clock.advance(20)
        async with api.chat(bearer("acme-2"), stream=True) as response:
            assert response.status == 200
            assert response.headers["x-ratelimit-remaining-requests"] == "0"


async def test_tokens_of_prompt_and_answer_are_charged(tenants: Tenants) -> None:
    generator = FakeGenerator(script=says("Hello world"))
    async with served(generator, tenants=tenants) as api:
        async with api.chat(bearer("acme-1")) as response:
            usage = (await response.json())["usage"]
        async with api.client.get("/v1/models", headers=bearer("acme-1")) as response:
            left = int(response.headers["x-ratelimit-remaining-tokens"])
        assert left == 1000 - usage["total_tokens"]
        generator.start_error = Overloaded("busy", 3.0)
        async with api.chat(bearer("acme-1")) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "3"
        async with api.client.get("/v1/models", headers=bearer("acme-1")) as response:
            assert int(response.headers["x-ratelimit-remaining-tokens"]) == left, "given back"


async def test_nobody_is_told_to_retry_what_never_fits(tenants: Tenants) -> None:
    async with (
        served(tenants=tenants) as api,
        api.embed(bearer("acme-1"), input=[[3] * 400, [4] * 400, [5] * 201]) as response,
    ):
        assert response.status == 429
        assert "Retry-After" not in response.headers
        assert response.headers["x-should-retry"] == "false"


async def test_prompts_without_answers_are_charged_too(tenants: Tenants) -> None:
    generator = FakeGenerator(script=lambda request: [Tokens([])])
    async with served(generator, tenants=tenants) as api:
        async with api.embed(bearer("acme-1"), input=[[3] * 400, [4] * 300]) as response:
            assert response.status == 200
        async with api.client.get("/v1/models", headers=bearer("acme-1")) as response:
            assert response.headers["x-ratelimit-remaining-tokens"] == "300"
        async with api.embed(bearer("acme-1"), input=[3] * 400) as response:
            assert response.status == 429


async def test_what_was_dispatched_of_a_call_that_fails_is_charged(tenants: Tenants) -> None:
    def script(request: GenerationRequest) -> list[Step]:
        is_first = request.prompt.token_ids[0] == 3
        return [Tokens([])] if is_first else [Pause(0.0), NodeLost("it is gone")]

    async with served(FakeGenerator(script), tenants=tenants) as api:
        async with api.embed(bearer("acme-1"), input=[[3] * 400, [4] * 300]) as response:
            assert response.status == 502
        assert await tokens_left(api) == 300


async def tokens_left(api: Harness) -> int:
    async with api.client.get("/v1/models", headers=bearer("acme-1")) as response:
        return int(response.headers["x-ratelimit-remaining-tokens"])


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("endpoint", matrix(["chat/completions", "completions", "embeddings"], 1))
@pytest.mark.parametrize("was_dispatched", [True, False])
async def test_leaving_before_the_first_token_saves_nothing(
    tenants: Tenants, endpoint: str, is_streaming: bool, was_dispatched: bool
) -> None:
    """The prompt is charged once it was sent to nodes; what left the waiting line is not."""
    generator = FakeGenerator(lambda _: [Pause(until=asyncio.Event())])
    if not was_dispatched:
        generator.route = Route(None, None)
    body: dict[str, Any] = {"model": MODEL, "stream": is_streaming}
    match endpoint:
        case "chat/completions":
            body["messages"] = [{"role": "user", "content": "Hi there"}]
        case "completions":
            body |= {"prompt": [[3] * 100, [4] * 100], "n": 2}
        case "embeddings":
            body = {"model": MODEL, "input": [[3] * 100, [4] * 100]}
    async with served(generator, tenants=tenants) as api:
        calling = asyncio.create_task(
            api.client.post(f"/v1/{endpoint}", json=body, headers=bearer("acme-1"))
        )
        await generator.started.wait()
        calling.cancel()
        async with asyncio.timeout(30):
            await api.observer.over.wait()
        prompts = {tuple(g.request.prompt.token_ids) for g in generator.generations}
        num_tokens = sum(map(len, prompts)) if was_dispatched else 0
        assert await tokens_left(api) == 1000 - num_tokens


async def test_of_a_call_whose_second_prompt_is_refused_the_first_is_charged(
    tenants: Tenants,
) -> None:
    def script(request: GenerationRequest) -> list[Step]:
        if request.prompt.token_ids[0] == 4:
            raise Overloaded("busy", 3.0)
        return [Pause(until=asyncio.Event())]

    async with served(FakeGenerator(script), tenants=tenants) as api:
        async with api.complete(bearer("acme-1"), prompt=[[3] * 400, [4] * 300]) as response:
            assert response.status == 429
        assert await tokens_left(api) == 600


async def test_a_key_that_is_no_text_is_nobodys(tenants: Tenants) -> None:
    async with served(tenants=tenants) as api, connected(api) as client:
        client.writer.write(
            b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\xfe\r\n\r\n"
        )
        answer = await client.read_until(b"}}")
    assert answer.startswith(b"HTTP/1.1 401 ")


async def test_usage_is_written_down(tenants: Tenants, usage: Path) -> None:
    async with served(tenants=tenants) as api:
        async with api.chat(bearer("night")) as response:
            told = (await response.json())["usage"]
        async with api.chat(bearer("night"), temperature=9) as response:
            assert response.status == 400
        async with api.client.get("/v1/models", headers=bearer("night")) as response:
            assert response.status == 200, "no call of the model"
    tenants.close()
    (row,) = read_usage(usage, "tenant")
    assert (row.group, row.requests, row.failed) == ("nightly", 2, 1)
    assert row.prompt_tokens == told["prompt_tokens"]
    assert row.cached_tokens == told["prompt_tokens_details"]["cached_tokens"]
    assert row.output_tokens == told["completion_tokens"]


async def test_prompts_without_answers_are_paid_for(tenants: Tenants, usage: Path) -> None:
    async with served(tenants=tenants) as api:
        async with api.embed(bearer("night"), input=[[5, 6, 7], [8]]) as response:
            assert response.status == 200, await response.text()
        async with api.complete(
            bearer("night"), prompt=[5, 6], echo=True, max_tokens=0
        ) as response:
            assert response.status == 200, await response.text()
        async with api.embed(bearer("night"), slo_class="interactive") as response:
            assert response.status == 403
    tenants.close()
    (row,) = read_usage(usage, "tenant")
    assert (row.requests, row.failed, row.prompt_tokens, row.output_tokens) == (3, 1, 6, 0)


async def test_only_operators_change_the_cluster(tenants: Tenants) -> None:
    async with served(tenants=tenants) as api:
        for key, status in (("acme-1", 403), ("friend", 404)):
            async with api.client.post("/admin/role", headers=bearer(key), json={}) as response:
                assert response.status == status


async def test_responses_are_their_tenants(tenants: Tenants) -> None:
    async with served(tenants=tenants) as api:
        asked: Any = {"model": MODEL, "input": "Hi"}
        acme = bearer("acme-1")
        async with api.client.post("/v1/responses", headers=acme, json=asked) as response:
            made = await response.json()
        path = f"/v1/responses/{made['id']}"
        again = asked | {"previous_response_id": made["id"]}
        for key, status in (("night", 404), ("friend", 404), ("acme-2", 200)):
            head = bearer(key)
            async with api.client.get(path, headers=head) as response:
                assert response.status == status
            async with api.client.post("/v1/responses", headers=head, json=again) as response:
                assert response.status == status
            async with api.client.delete(path, headers=head) as response:
                assert response.status == status


@pytest.mark.parametrize(
    ("host", "environment", "error"),
    [
        ("127.0.0.1", {}, None),
        ("::1", {}, None),
        ("localhost", {}, None),
        ("0.0.0.0", {"PDSERVE_API_KEY": "k"}, None),
        ("0.0.0.0", {}, "--key-file"),
        ("10.1.2.3", {"PDSERVE_API_KEY": ""}, "PDSERVE_API_KEY"),
    ],
)
def test_a_network_is_not_let_in_without_keys(
    host: str, environment: dict[str, str], error: str | None
) -> None:
    def opened() -> Tenants:
        config = CoordinatorConfig(host=host)
        return open_tenants(config, CLASSES, MODEL, environment, ManualClock())

    if error is None:
        assert opened()
    else:
        with pytest.raises(ConfigError, match=error):
            opened()


async def test_the_key_of_the_environment_is_an_operators() -> None:
    environment: dict[str, Any] = {"PDSERVE_API_KEY": "secret"}
    tenants = open_tenants(CoordinatorConfig(), CLASSES, MODEL, environment, ManualClock())
    async with served(tenants=tenants) as api:
        async with api.chat(bearer("secret")) as response:
            assert response.status == 200
        async with api.chat() as response:
            assert response.status == 401
        async with api.client.post("/admin/x", headers=bearer("secret")) as response:
            assert response.status == 404


@pytest.mark.parametrize("has_keys", matrix([True, False], 1))
@pytest.mark.parametrize("token", ["", "m" * 16])
@pytest.mark.parametrize("anybody", [False, True])
async def test_the_state_is_for_who_has_a_key_or_the_token_for_it(
    tenants: Tenants, *, has_keys: bool, token: str, anybody: bool
) -> None:
    known = tenants if has_keys else Tenants(None, None, MODEL, ManualClock())
    readers = Readers(known, token, "supervisor", anybody=anybody)
    seen = {}
    async with served(tenants=known, readers=readers) as api:
        for path in ("/status", "/metrics", "/metrics/targets", "/health"):
            for shown in ("", "unknown", "acme-1", "m" * 16, "supervisor"):
                headers = {"Host": "far.example"} if has_keys else {}
                headers |= bearer(shown) if shown else {}
                async with api.client.get(path, headers=headers) as response:
                    seen[path, shown] = response.status == 200
        async with connected(api) as client:
            head = b"GET /status HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\r\n\r\n"
            client.writer.write(head)
            what_is_no_text = await client.reader.readline()
    is_open = anybody or not (has_keys or token)
    assert (b" 200 " if is_open else b" 401 ") in what_is_no_text
    may = {"supervisor"} | ({"acme-1"} if has_keys else set()) | ({token} if token else set())
    assert seen == {(p, shown): is_open or shown in may or p == "/health" for p, shown in seen}
