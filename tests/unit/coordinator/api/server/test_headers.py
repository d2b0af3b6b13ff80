"""Headers of every answer, and what browsers are told of other people's pages."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.api.config import parse_origins
from coordinator.tenants.opening import open_tenants
from pdserve.settings.config import CoordinatorConfig
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import ConfigError
from tests.fakes.generator import MODEL
from tests.matrix import matrix
from tests.unit.coordinator.api.harness import served
from tests.unit.coordinator.api.raw_client import connected

PAGE = "https://page.example"
ASKS = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@pytest.mark.parametrize("stream", [True, False])
async def test_answers_say_how_long_they_took(stream: bool) -> None:
    async with served() as api, api.chat(stream=stream) as response:
        assert int(response.headers["openai-processing-ms"]) >= 0
        assert response.headers["openai-version"] == "2020-10-01"
        assert response.headers["x-request-id"]


async def test_openais_name_of_a_clients_request_id_is_known() -> None:
    async with served() as api:
        async with api.chat({"X-Client-Request-Id": "mine"}) as response:
            assert response.headers["x-request-id"] == "mine"
        both = {"X-Client-Request-Id": "mine", "x-request-id": "proxy's"}
        async with api.chat(both) as response:
            assert response.headers["x-request-id"] == "mine", "the other one is not sane"


@pytest.mark.parametrize(
    ("origins", "allowed"),
    [
        ((), None),
        (("https://other.example",), None),
        ((PAGE, "https://other.example"), PAGE),
        (("*",), "*"),
    ],
)
async def test_pages_are_let_in_by_their_origin(
    origins: tuple[str, ...], allowed: str | None
) -> None:
    tenants = open_tenants(
        CoordinatorConfig(host="0.0.0.0"), (), MODEL, {"PDSERVE_API_KEY": "secret"}, ManualClock()
    )
    key = {"Authorization": "Bearer secret"}
    async with served(tenants=tenants, cors_origins=origins) as api:
        async with api.client.options("/v1/chat/completions", headers=ASKS) as response:
            preflight = response
            assert response.status == (204 if origins else 401)
        answers = [preflight]
        bodies: list[dict[str, Any]] = [{}, {"stream": True}, {"temperature": 9}]
        for body in bodies:
            async with api.chat(key | {"Origin": PAGE}, **body) as response:
                answers.append(response)
        async with api.chat({"Origin": PAGE}) as response:
            answers.append(response)
    assert [answer.status for answer in answers[1:]] == [200, 200, 400, 401]
    for answer in answers:
        assert answer.headers.get("Access-Control-Allow-Origin") == allowed
        assert (answer.headers.get("Vary") == "Origin") == (origins not in ((), ("*",)))
        shown = answer.headers.get("Access-Control-Expose-Headers", "")
        assert ("x-request-id" in shown) == (allowed is not None)
    wanted = None if allowed is None else ASKS["Access-Control-Request-Headers"]
    assert preflight.headers.get("Access-Control-Allow-Headers") == wanted
    assert ("POST" in preflight.headers.get("Access-Control-Allow-Methods", "")) == bool(allowed)


@pytest.mark.parametrize(
    ("host", "is_ours"),
    matrix(
        [
            ("localhost", True),
            ("LocalHost:8000", True),
            ("cluster.localhost:8000", True),
            ("127.0.0.1:8000", True),
            ("127.9.9.9", True),
            ("[::1]:8000", True),
            ("[::1]", True),
            ("", False),
            ("evil.example:8000", False),
            ("localhost.evil.example", False),
            ("127.0.0.1.evil.example:8000", False),
            ("evillocalhost", False),
            ("10.0.0.1:8000", False),
            ("0.0.0.0:8000", False),
            ("[::1", False),
        ],
        4,
    ),
)
async def test_no_page_can_point_its_own_name_at_a_cluster_without_keys(
    host: str, is_ours: bool
) -> None:
    """To a browser it is the page's own server then, so it would ask nothing before."""
    page = {"Host": host, "Origin": f"http://{host}"}
    async with served(cors_origins=(PAGE,)) as api:
        async with api.chat(page) as response:
            assert response.status == (200 if is_ours else 403)
            assert is_ours or "use localhost or 127.0.0.1" in await response.text()
        async with api.client.get("/status", headers=page) as response:
            assert (response.status == 403) == (not is_ours)
        async with api.client.options("/v1/models", headers=ASKS | {"Host": host}) as response:
            assert response.status == (204 if is_ours else 403)
    keyed = open_tenants(
        CoordinatorConfig(), (), MODEL, {"PDSERVE_API_KEY": "secret"}, ManualClock()
    )
    async with (
        served(tenants=keyed) as api,
        api.chat(page | {"Authorization": "Bearer secret"}) as response,
    ):
        assert response.status == 200, "no page knows the key"


async def test_who_names_no_host_is_no_browser() -> None:
    async with served() as api, connected(api) as client:
        client.writer.write(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert (await client.read_until_broken()).startswith(b"HTTP/1.0 200")


def test_what_no_browser_would_call_an_origin_is_refused() -> None:
    good = ("*", PAGE, "http://localhost:3000")
    assert parse_origins(good) == good
    for bad in ("", "page.example", f"{PAGE}/", f"{PAGE}/app", "HTTPS://page.example"):
        with pytest.raises(ConfigError, match="is not an origin"):
            parse_origins([*good, bad])
