"""Idempotency keys: the same call again is the same call, at any coordinator."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from coordinator.api.read import idempotency
from coordinator.api.read.idempotency import KeyedCall, KnownKeys
from pdserve.protocol import FinishReason
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import IdempotencyKeyReused
from tests.fakes.generator import (
    EOS,
    FakeGenerator,
    Pause,
    Step,
    Tokens,
    says,
    tiny_tokenizer,
    tool_tokenizer,
)
from tests.unit.coordinator.api.harness import Harness, served

KEY = {"Idempotency-Key": "key 1"}
TEXT = "Hello world, and again"
CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Bern"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def at_once(text: str, *, per_event: int = 1000) -> FakeGenerator:
    return FakeGenerator(says(text, per_event=per_event))


def held(gate: asyncio.Event, text: str = TEXT, num_first: int = 2) -> FakeGenerator:
    """Some tokens come, the others once the gate is open."""
    ids = tiny_tokenizer().encode(text, add_special_tokens=False)

    def script(_: Any) -> list[Step]:
        first, rest = Tokens(ids[:num_first]), Tokens(ids[num_first:])
        return [first, Pause(until=gate), rest, Tokens([EOS], FinishReason.STOP, EOS)]

    return FakeGenerator(script)


async def events(api: Harness, last: str | None = None, **body: Any) -> list[str]:
    headers = KEY if last is None else KEY | {"Last-Event-ID": last}
    async with api.chat(headers, stream=True, **body) as response:
        assert response.status == 200, await response.text()
        return (await response.text()).split("\n\n")[:-1]


def timeless(blocks: list[str]) -> list[str]:
    """Without the time of creation."""
    return [block.partition('"created":')[0] + block.partition('"model":')[2] for block in blocks]


async def test_without_a_key_nothing_has_changed() -> None:
    async with served(at_once(TEXT)) as api:
        async with api.chat(stream=True) as response:
            assert b"id: " not in await response.read()
        assert not api.generator.last.request.is_claimable
        assert len(api.server_context.known_keys) == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_another_coordinator_gives_the_same_ids_and_seeds(path: str) -> None:
    asked: dict[str, Any] = {"model": "alias"}
    asked |= {"messages": [{"role": "user", "content": "Hi"}], "n": 2} if "chat" in path else {}
    asked |= {"prompt": ["a", "b"]} if path == "/v1/completions" else {"input": "Hi"}
    if "chat" in path:
        del asked["input"]
    answers, requests = [], []
    for _ in range(2):
        async with served(at_once(TEXT)) as api:
            async with api.client.post(path, json=asked, headers=KEY) as response:
                assert response.status == 200, await response.text()
                answers.append((await response.json())["id"])
            requests.append([g.request for g in api.generator.generations])
            async with api.client.post(path, json=asked, headers=KEY) as response:
                assert (await response.json())["id"] == answers[0], "it may be sent again"
            other = {"Idempotency-Key": "another"}
            async with api.client.post(path, json=asked, headers=other) as response:
                assert (await response.json())["id"] != answers[0]
            assert api.generator.last.request.sampling.seed != requests[0][0].sampling.seed
    assert answers[0] == answers[1]
    first, second = ([(r.request_id, r.sampling.seed) for r in each] for each in requests)
    assert first == second
    assert len({seed for _, seed in first}) == len({name for name, _ in first}) == len(first)
    assert all(r.is_claimable for each in requests for r in each)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
async def test_only_scores_of_the_prompt_are_not_claimed_and_a_seed_is_heeded(field: str) -> None:
    asked: dict[str, Any] = {"model": "alias", "prompt": "a", "seed": 7, field: 1}
    async with served(at_once(TEXT)) as api:
        async with api.client.post("/v1/completions", json=asked, headers=KEY) as response:
            assert response.status == 200
        request = api.generator.last.request
    assert (request.is_claimable, request.sampling.seed) == (field == "logprobs", 7)


@pytest.mark.parametrize("per_event", [1, 3])
async def test_events_do_not_depend_on_what_arrives_together(per_event: int) -> None:
    async with served(at_once(TEXT)) as api, served(at_once(TEXT, per_event=per_event)) as other:
        whole = await events(api)
        assert timeless(await events(other)) == timeless(whole)
        ids = [block.partition("\n")[0] for block in whole]
        assert ids == [f"id: {number}" for number in range(1, len(whole) + 1)]
        assert whole[-1].endswith("data: [DONE]")
        for last in (0, 1, 5, len(whole)):
            assert timeless(await events(other, str(last))) == timeless(whole[last:])


async def test_ids_count_the_events_of_each_answer() -> None:
    """The second answer comes before the first one, and then behind it."""
    gates = [asyncio.Event(), asyncio.Event()]
    gates[1].set()

    def script(request: Any) -> list[Step]:
        choice = int(request.request_id.endswith("-1"))
        steps = says(f"{TEXT} {choice}")(request)
        return [Pause(until=gates[choice]), *steps]

    seen: list[str] = []
    async with served(FakeGenerator(script)) as api:
        async with api.chat(KEY, stream=True, n=2) as response:
            while not (seen and seen[-1].startswith("id: 1-5")):
                block = await response.content.readuntil(b"\n\n")
                seen.append(block.decode().removesuffix("\n\n"))
        gates[0].set()
        rest = await events(api, "1-5", n=2)
        whole = await events(api, n=2)
    of_each = [
        sorted(block.partition("data: ")[2] for block in timeless(blocks))
        for blocks in (seen + rest, whole)
    ]
    assert of_each[0] == of_each[1]
    assert rest[-1].partition("\n")[0] == whole[-1].partition("\n")[0]


async def test_the_id_of_a_tool_call_is_the_same() -> None:
    found = []
    for _ in range(2):
        async with (
            served(at_once(CALL), tool_tokenizer()) as api,
            api.chat(KEY, tools=[TOOL]) as response,
        ):
            message = (await response.json())["choices"][0]["message"]
            found.append(message["tool_calls"][0]["id"])
    assert found[0] == found[1]


@pytest.mark.parametrize("last", [None, "1"])
async def test_a_key_is_in_use_while_its_call_runs(last: str | None) -> None:
    gate = asyncio.Event()
    async with served(held(gate), former_call_s=0.01) as api:
        async with api.chat(KEY, stream=True) as running:
            headers = KEY if last is None else KEY | {"Last-Event-ID": last}
            async with api.chat(headers, stream=True) as refused:
                assert refused.status == 409
                assert (await refused.json())["error"]["code"] == "idempotency_key_in_use"
            gate.set()
            assert "[DONE]" in await running.text()
        assert len(api.generator.generations) == 1


async def test_a_stream_that_comes_back_waits_for_the_end_of_its_former_connection() -> None:
    gate = asyncio.Event()
    async with served(held(gate)) as api, served(at_once(TEXT)) as other:
        whole = await events(other)
        async with api.chat(KEY, stream=True) as running:
            blocks = [await running.content.readuntil(b"\n\n") for _ in range(2)]
            back = asyncio.create_task(events(api, str(len(blocks))))
            await asyncio.sleep(0)
            running.close()
        gate.set()
        parts = [block.decode().removesuffix("\n\n") for block in blocks] + await back
        assert timeless(parts) == timeless(whole)
        former, again = api.generator.generations
        assert former.cancels == ["client disconnected"]
        assert former.request.request_id == again.request.request_id


@pytest.mark.parametrize("is_streaming", [True, False])
async def test_what_does_not_end_before_its_coordinator_is_left_to_be_claimed(
    is_streaming: bool,
) -> None:
    """A stream breaks as if the process had died; who has nothing yet is told to come back."""
    async with served(held(asyncio.Event())) as api:
        calling = asyncio.create_task(api.chat(KEY, stream=is_streaming).__aenter__())
        await api.generator.started.wait()
        response = await calling if is_streaming else None
        if response is not None:
            await response.content.readuntil(b"\n\n")
        await api.server.stop(grace_s=0.0)
        if response is not None:
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        else:
            response = await calling
            assert response.status == 503
            assert response.headers["Retry-After"]
        response.close()
    (generation,) = api.generator.generations
    assert generation.is_left
    assert generation.cancels == []


async def test_another_request_under_a_known_key_is_refused() -> None:
    async with served(at_once(TEXT)) as api:
        async with api.chat(KEY) as response:
            assert response.status == 200
        async with api.chat(KEY, max_tokens=3) as response:
            assert response.status == 422
            assert (await response.json())["error"]["code"] == "idempotency_key_reused"
        async with api.complete(KEY) as response:
            assert response.status == 422, "another endpoint is another request"


@pytest.mark.parametrize(
    "headers",
    [
        {"Idempotency-Key": ""},
        {"Idempotency-Key": "x" * 256},
        {"Idempotency-Key": "a\tb"},
        KEY | {"Last-Event-ID": "-1"},
        KEY | {"Last-Event-ID": "1-2"},
    ],
)
async def test_headers_that_mean_nothing_are_refused(headers: dict[str, str]) -> None:
    async with served(at_once(TEXT)) as api:
        async with api.chat(headers, stream=True) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] in headers
        async with api.chat(KEY) as response:
            assert response.status in (200, 422)


async def test_a_repeated_turn_is_in_its_conversation_once() -> None:
    async with served(at_once(TEXT)) as api:
        async with api.client.post("/v1/conversations", json={}) as made:
            conversation = (await made.json())["id"]
        asked = {"input": "Hi", "conversation": conversation}
        prompts = []
        for _ in range(2):
            async with api.client.post("/v1/responses", json=asked, headers=KEY) as response:
                assert response.status == 200
            prompts.append(api.generator.last.request.prompt.token_ids)
        assert prompts[0] == prompts[1]
        async with api.client.get(f"/v1/conversations/{conversation}/items") as listed:
            assert len((await listed.json())["data"]) == 2


def call(owner: str, key: str, body: bytes = b"") -> KeyedCall:
    made = KeyedCall(owner, key, "/", None)
    made.add(body)
    return made


async def test_known_keys_are_bounded_and_shared_fairly() -> None:
    clock = ManualClock()
    keys = KnownKeys(clock, max_keys=3)
    for key in "abcd":
        made = call("many", key)
        await keys.begin(made)
        if key != "b":  # still running: it is kept
            keys.end(made)
        await keys.begin(call("few", "a")) if key == "a" else None
    assert len(keys) == 3
    await keys.begin(call("many", "a", b"other"))  # forgotten
    with pytest.raises(IdempotencyKeyReused):
        await keys.begin(call("many", "b", b"other"))
    with pytest.raises(IdempotencyKeyReused):
        await keys.begin(call("few", "a", b"other"))


async def test_a_key_is_forgotten_after_a_while() -> None:
    clock = ManualClock()
    keys = KnownKeys(clock)
    made = call("", "a")
    await keys.begin(made)
    keys.end(made)
    clock.advance(idempotency.KNOWN_S + 1)
    await keys.begin(call("", "a", b"other"))
