"""Bodies, paths, methods and headers: HTTP before any of it is about generating."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes.generator import MODEL
from tests.unit.coordinator.api.harness import is_error_body, served

MESSAGES: Any = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("raw", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"", {}, 400),
        (b"[]", {}, 400),
        (b"null", {}, 400),
        (b"\xff\xfe", {}, 400),
        (b'{"a": "\xff"}', {}, 400),
        (b'{"model": "\\ud800"}', {}, 400),
        (b"[" * 100_000, {}, 400),
        (b'{"a":' * 100_000, {}, 400),
        (b"{}", {"Content-Type": "text/plain"}, 415),
        (b"a=b", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        (b"{}", {"Content-Encoding": "gzip"}, 415),
        (b"x" * 3000, {}, 413),
    ],
)
async def test_an_unreadable_body_is_refused_with_its_status(
    raw: bytes, headers: dict[str, str], status: int
) -> None:
    limit: dict[str, Any] = {"max_body_bytes": 2000} if status == 413 else {}
    headers = {"Content-Type": "application/json"} | headers
    async with served(**limit) as api:
        for path in ("/v1/chat/completions", "/v1/completions"):
            async with api.client.post(path, data=raw, headers=headers) as response:
                body = await response.json(content_type=None)
            assert response.status == status
            assert is_error_body(body)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        # A page can send this to any server without asking first.
        ({"Origin": "https://theirs.example"}, 415),
    ],
)
async def test_a_missing_content_type_is_taken_for_json_but_not_from_a_page(
    headers: dict[str, str], status: int
) -> None:
    raw = json.dumps({"model": MODEL, "messages": MESSAGES}).encode()
    async with served() as api:
        untyped = api.client.post(
            "/v1/chat/completions", data=raw, headers=headers, skip_auto_headers=["Content-Type"]
        )
        async with untyped as response:
            assert response.status == status
            assert status == 200 or "has no Content-Type" in await response.text()
        assert len(api.generator.generations) == (status == 200)


async def test_unknown_paths_and_methods() -> None:
    async with served() as api:
        async with api.client.get("/v2/nothing") as response:
            assert response.status == 404
            assert is_error_body(await response.json())
            assert response.headers["x-request-id"]
        async with api.client.get("/v1/chat/completions") as response:
            assert response.status == 405
            assert response.headers["Allow"] == "POST"
            assert is_error_body(await response.json())


@pytest.mark.parametrize(
    ("sent", "is_echoed"),
    [("abc-1", True), ("a/b:c", True), ("x" * 129, False), ("a b", False), ("ü", False)],
)
async def test_a_sound_request_id_is_echoed_and_never_used_inside(
    sent: str, is_echoed: bool
) -> None:
    async with served() as api:
        headers = {"x-request-id": sent}
        for path in ("/health", "/nothing"):
            async with api.client.get(path, headers=headers) as response:
                assert (response.headers["x-request-id"] == sent) == is_echoed
        body = {"model": MODEL, "messages": MESSAGES, "stream": True}
        async with api.client.post("/v1/chat/completions", json=body, headers=headers) as response:
            assert (response.headers["x-request-id"] == sent) == is_echoed
        assert api.generator.last.request.request_id != sent
