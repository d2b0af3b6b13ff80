"""Message batches: the same runs, in Anthropic's form."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from coordinator.api.read import json_text
from tests.fakes.generator import MODEL, Pause, says
from tests.unit.coordinator.api.harness import Harness, served
from tests.unit.coordinator.api.protocols import HI
from tests.unit.coordinator.jobs.played import cluster

PATH = "/v1/messages/batches"
DEADLINE_S = 20.0


def one(number: int, **more: Any) -> dict[str, Any]:
    params = {"model": MODEL, "max_tokens": 20, "messages": HI, **more}
    return {"custom_id": f"m-{number}", "params": params}


async def asked(api: Harness, method: str, path: str, status: int = 200, body: Any = None) -> Any:
    async with api.client.request(method, path, json=body) as response:
        assert response.status == status, await response.text()
        found = await response.json()
    assert status == 200 or found["type"] == "error"
    return found


async def ended(api: Harness, batch: Any) -> Any:
    async with asyncio.timeout(DEADLINE_S):
        while batch["processing_status"] != "ended":
            await asyncio.sleep(0.01)
            batch = await asked(api, "GET", f"{PATH}/{batch['id']}")
    return batch


async def results(api: Harness, batch: Any) -> dict[str, Any]:
    async with api.client.get(batch["results_url"]) as response:
        assert response.status == 200, await response.text()
        lines = [json.loads(text) for text in (await response.text()).splitlines()]
    found = {line["custom_id"]: line["result"] for line in lines}
    assert len(found) == len(lines)
    return found


async def test_every_message_is_answered_once_and_listed() -> None:
    async with served(cluster(says("Hello"))) as api:
        given = [*(one(n) for n in range(6)), one(6, model="no")]
        batch = await asked(api, "POST", PATH, body={"requests": given})
        assert (batch["type"], batch["results_url"]) == ("message_batch", None)
        assert sum(batch["request_counts"].values()) == 7
        batch = await ended(api, batch)
        assert batch["request_counts"]["succeeded"] == 6
        found = await results(api, batch)
        assert found.pop("m-6")["error"]["error"]["type"] == "not_found_error"
        texts = [result["message"]["content"][0]["text"] for result in found.values()]
        assert texts == ["Hello"] * 6
        other = await asked(api, "POST", PATH, body={"requests": [one(1)]})
        await ended(api, other)
        page = await asked(api, "GET", f"{PATH}?limit=1")
        behind = await asked(api, "GET", f"{PATH}?after_id={page['last_id']}")
        both = [entry["id"] for entry in (*page["data"], *behind["data"])]
        assert (sorted(both), page["has_more"]) == (sorted([batch["id"], other["id"]]), True)
        back = await asked(api, "GET", f"{PATH}?before_id={behind['first_id']}")
        assert [entry["id"] for entry in back["data"]] == both[:1]
        gone = await asked(api, "DELETE", f"{PATH}/{batch['id']}")
        assert gone == {"type": "message_batch_deleted", "id": batch["id"]}
        await asked(api, "GET", f"{PATH}/{batch['id']}", 404)
        await asked(api, "GET", f"{PATH}/{batch['id']}/results", 404)


async def test_each_request_has_the_limits_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """All together have more objects than a body may become: they become so one by one."""
    monkeypatch.setattr(json_text, "MAX_MEMBERS", 20)
    monkeypatch.setattr(json_text, "MAX_IN_PARTS", 99)
    async with served(cluster(says("Hello"))) as api:
        batch = await asked(api, "POST", PATH, body={"requests": [one(n) for n in range(9)]})
        assert (await ended(api, batch))["request_counts"]["succeeded"] == 9
        for wrong, why in (
            ([one(1), one(2, metadata=dict.fromkeys("abcdefghijklmnopqrst", ""))], "requests[1]"),
            ([one(n) for n in range(99)], "more than 99 lists and objects"),
            ([one(1, metadata=json.loads("[" * 200 + "]" * 200))], "deeper than"),
        ):
            found = await asked(api, "POST", PATH, 400, {"requests": wrong})
            assert why in found["error"]["message"]


async def test_cancelling_and_what_is_refused() -> None:
    gate = asyncio.Event()
    generator = cluster(lambda request: [Pause(until=gate), *says("Hi")(request)])
    async with served(generator) as api:
        batch = await asked(api, "POST", PATH, body={"requests": [one(n) for n in range(9)]})
        await generator.started.wait()
        await asked(api, "GET", f"{PATH}/{batch['id']}/results", 400)
        await asked(api, "DELETE", f"{PATH}/{batch['id']}", 400)
        batch = await asked(api, "POST", f"{PATH}/{batch['id']}/cancel")
        assert batch["cancel_initiated_at"]
        batch = await ended(api, batch)
        assert batch["request_counts"]["canceled"] == 9
        assert set(map(str, (await results(api, batch)).values())) == {"{'type': 'canceled'}"}
        for wrong in (
            {"requests": []},
            {"requests": [one(1), one(1)]},
            {"requests": [one(1, stream=True)]},
            {"requests": [{"custom_id": "x"}]},
            {"requests": [{"custom_id": "x", "params": []}]},
            {"requests": [one(1)], "what": 1},
            {},
            [],
        ):
            await asked(api, "POST", PATH, 400, wrong)
