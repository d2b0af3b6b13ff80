"""Every protocol has every guarantee: one suite over all of them."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from coordinator.tenants import Tenants
from coordinator.tenants.key_book import KeyBook
from coordinator.tenants.ledger import Ledger
from coordinator.tenants.report import read_usage
from pdserve.model_files.sampling_defaults import SamplingDefaults
from pdserve.protocol import FinishReason
from pdserve.settings.access import hash_key
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import NodeLost, NoNodeAvailable, Overloaded, SloUnreachable
from tests.fakes.generator import EOS, MODEL, FakeGenerator, Pause, Step, Tokens, says
from tests.fakes.generator import tiny_tokenizer as tokenizer
from tests.unit.coordinator.api.harness import Harness, served
from tests.unit.coordinator.api.protocols import ALL, NAMES, Speech, text_of

TEXT = "Hello world, and again"
KEY = {"Idempotency-Key": "key 1"}
pytestmark = pytest.mark.parametrize("speech", ALL, ids=NAMES)


async def blocks(
    api: Harness, speech: Speech, headers: dict[str, str] | None = None, **more: Any
) -> list[str]:
    asked = speech.asked(stream=True, **more)
    async with api.client.post(speech.path, json=asked, headers=headers) as response:
        assert response.status == 200, await response.text()
        return (await response.text()).split("\n\n")[:-1]


def timeless(given: list[str]) -> list[str]:
    return [re.sub(r'"(created|created_at|completed_at)":\d+', "", block) for block in given]


async def test_whole_and_streamed_answers_are_the_same(speech: Speech) -> None:
    async with served(FakeGenerator(says(TEXT))) as api:
        async with api.client.post(speech.path, json=speech.asked()) as response:
            assert speech.text(await response.json()) == TEXT
        streamed = await blocks(api, speech)
    assert text_of(speech, streamed) == TEXT
    assert speech.end in streamed[-1]


@pytest.mark.parametrize("per_event", [1, 3])
async def test_a_keyed_stream_is_the_same_at_any_coordinator(
    speech: Speech, per_event: int
) -> None:
    """Whatever arrives together, and from wherever it is gone on with."""
    async with (
        served(FakeGenerator(says(TEXT))) as api,
        served(FakeGenerator(says(TEXT, per_event=per_event))) as other,
    ):
        whole = timeless(await blocks(api, speech, KEY))
        for last in (0, 1, len(whole) // 2, len(whole)):
            rest = await blocks(other, speech, KEY | {"Last-Event-ID": str(last)})
            assert timeless(rest) == whole[last:]
        ours, theirs = (a.generator.last.request for a in (api, other))
        assert (ours.request_id, ours.sampling.seed) == (theirs.request_id, theirs.sampling.seed)
        assert ours.is_claimable


async def test_what_a_key_stands_for_is_one_call(speech: Speech) -> None:
    async with served(FakeGenerator(says(TEXT))) as api:
        for limit, status in ((9, 200), (9, 200), (8, 422)):
            asked = speech.asked(**{speech.limit: limit})
            async with api.client.post(speech.path, json=asked, headers=KEY) as response:
                body = await response.json()
                assert (response.status, speech.is_error(body) if status > 200 else True) == (
                    status,
                    True,
                )


async def test_a_coordinator_that_ends_leaves_a_keyed_stream_to_be_claimed(speech: Speech) -> None:
    ids = tokenizer().encode(TEXT, add_special_tokens=False)
    gate = asyncio.Event()
    script: list[Step] = [Tokens(ids[:2]), Pause(until=gate), Tokens([EOS], FinishReason.STOP, EOS)]
    async with served(FakeGenerator(lambda _: script)) as api:
        calling = api.client.post(speech.path, json=speech.asked(stream=True), headers=KEY)
        async with calling as response:
            await response.content.readuntil(b"\n\n")
            await api.server.stop(grace_s=0.0)
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
    assert api.generator.last.is_left


async def test_a_client_that_hangs_up_is_not_computed_for(speech: Speech) -> None:
    gate = asyncio.Event()
    script: list[Step] = [
        Tokens(tokenizer().encode("Hi", add_special_tokens=False)),
        Pause(0, gate),
    ]
    async with served(FakeGenerator(lambda _: script)) as api:
        asked = speech.asked(stream=True)
        async with api.client.post(speech.path, json=asked) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        await api.observer.over.wait()
    assert api.generator.last.cancels == ["client disconnected"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("error", "overloaded"),
    [
        (Overloaded("full", 7.0), True),
        (SloUnreachable("it would be late", 7.0), True),
        (NoNodeAvailable("none"), False),
    ],
)
async def test_refusals_are_in_its_own_form_and_say_when_to_come_back(
    speech: Speech, error: Exception, overloaded: bool, streams: bool
) -> None:
    async with (
        served(FakeGenerator(start_error=error)) as api,
        api.client.post(speech.path, json=speech.asked(stream=streams)) as response,
    ):
        assert response.status == (speech.overloaded if overloaded else speech.unavailable)
        assert int(response.headers["Retry-After"]) == (7 if overloaded else 5)
        assert speech.is_error(await response.json())


async def test_a_failure_in_mid_stream_is_its_last_event(speech: Speech) -> None:
    ids = tokenizer().encode("Hello", add_special_tokens=False)
    script: list[Step] = [Tokens(ids), Pause(0.02), NodeLost("gone")]
    async with served(FakeGenerator(lambda _: script)) as api:
        told = await blocks(api, speech)
        assert "gone" in told[-1] + told[-2]
        assert speech.end not in "".join(told) or speech.end == "data: [DONE]"
        assert api.observer.finished[-1].error_code == "node_lost"


@pytest.mark.parametrize(
    ("broken", "status"),
    [
        ({"model": "no"}, 404),
        ({"temperature": 3.0}, 400),
        ({"there_is_no_such": 1}, 400),
        ({"model": 7}, 400),
    ],
)
async def test_what_is_wrong_is_said_in_its_own_form(
    speech: Speech, broken: dict[str, Any], status: int
) -> None:
    async with served() as api:
        async with api.client.post(speech.path, json=speech.asked(**broken)) as response:
            assert (response.status, speech.is_error(await response.json())) == (status, True)
        for headers, wrong in (({"Content-Type": "text/plain"}, 415), ({}, 400)):
            given = {"Content-Type": "application/json"} | headers
            async with api.client.post(speech.path, data=b"[", headers=given) as response:
                assert (response.status, speech.is_error(await response.json())) == (wrong, True)
        async with api.client.get(f"{speech.path}/none/such") as response:
            assert (response.status, speech.is_error(await response.json())) == (404, True)
    assert api.generator.generations == []


async def test_terms_and_constraints_reach_the_nodes(speech: Speech) -> None:
    headers = {"X-SLO-Class": "interactive", "X-Request-Timeout": "30"}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = speech.asked(**speech.schema(schema), temperature=0.5, top_p=0.75, top_k=5)
    async with served(FakeGenerator(says('{"a": 1}'))) as api:
        async with api.client.post(speech.path, json=asked, headers=headers) as response:
            assert response.status == 200, await response.text()
        request = api.generator.last.request
    assert request.slo.name == "interactive"
    assert 0 < request.deadline_s <= 30
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.75, 5)
    assert '"a"' in sampling.grammar


async def test_what_a_call_leaves_out_is_the_models_recommendation(speech: Speech) -> None:
    recommended = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.9, min_p=0.1)
    async with served(sampling=recommended) as api:
        for given in ({}, {"temperature": 1.0, "top_k": 0}, {"top_p": 1.0, "temperature": 0}):
            async with api.client.post(speech.path, json=speech.asked(**given)) as response:
                answer = await response.json()
                assert response.status == 200, answer
            sampling = api.generator.last.request.sampling
            for name in SamplingDefaults.__struct_fields__:
                used = getattr(sampling, name)
                assert used == given.get(name, getattr(recommended, name)), name
                assert answer.get(name, used) == used  # where it is said at all


async def test_a_stop_string_ends_it_everywhere(speech: Speech) -> None:
    async with served(FakeGenerator(says(TEXT, pause_s=0.001))) as api:
        asked = speech.asked(**{str(speech.stops): [","]})
        async with api.client.post(speech.path, json=asked) as response:
            assert speech.text(await response.json()) == "Hello world"
    assert api.generator.last.cancels == ["stop string"]


@pytest.mark.parametrize("scheme", ["Authorization", "x-api-key"])
async def test_keys_quotas_and_charges(speech: Speech, tmp_path: Path, scheme: str) -> None:
    file, clock = tmp_path / "keys.toml", ManualClock()
    file.write_text(
        f'[tenants.acme]\nkeys = ["{hash_key("acme-1")}"]\nrequests_per_minute = 2\n'
        'cache_group = "own"\n'
    )
    usage = tmp_path / "usage.sqlite"
    tenants = Tenants(KeyBook(file, {}, ("batch",), clock), Ledger(usage), MODEL, clock)
    key = {scheme: "Bearer acme-1" if scheme == "Authorization" else "acme-1"}
    statuses = []
    async with served(FakeGenerator(says(TEXT)), tenants=tenants) as api:
        for headers in ({}, key | {scheme: "wrong"}, key, key, key):
            asked = speech.asked()
            async with api.client.post(speech.path, json=asked, headers=headers) as response:
                body = await response.json()
                statuses.append(response.status)
                assert response.status == 200 or speech.is_error(body)
                assert ("Retry-After" in response.headers) == (response.status == 429)
        request = api.generator.last.request
    tenants.close()
    assert statuses == [401, 401, 200, 200, 429]
    assert request.slo.tenant == "acme"
    assert request.prompt.cache_salt
    (row,) = read_usage(usage, "tenant")
    num_tokens = len(tokenizer().encode(TEXT, add_special_tokens=False)) + 1
    assert (row.group, row.output_tokens) == ("acme", 2 * num_tokens)
