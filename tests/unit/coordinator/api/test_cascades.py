"""Cascades: which tier answers, what the client sees of it, and what it is charged for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from coordinator.models.cascade import Cascade, Hook, make_cascades
from coordinator.models.model import Catalog, make_model
from coordinator.tenants import Tenants
from coordinator.tenants.key_book import KeyBook
from coordinator.tenants.ledger import Ledger
from coordinator.tenants.report import read_usage
from pdserve.measured.routes import (
    NUM_SLOTS,
    HeldOut,
    Judged,
    RouteClassifier,
    digest_of,
    slots_of,
    write_classifier,
)
from pdserve.protocol import FinishReason
from pdserve.settings.access import hash_key
from pdserve.settings.cascades import Escalation, RegisteredCascade, Tier
from pdserve.shared.clock import ManualClock, SystemClock
from pdserve.shared.errors import ConfigError, NodeLost, Overloaded
from tests.fakes.generator import (
    EOS,
    FakeGenerator,
    Pause,
    Script,
    Step,
    Tokens,
    says,
    tiny_tokenizer,
    tool_tokenizer,
)
from tests.installed import install
from tests.unit.coordinator.api.harness import Harness, events_of, served

SMALL, LARGE = "Hello from the small one", "Hello from the large one"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Bern"}}\n</tool_call>'


def sure(text: str, *logprobs: float) -> Script:
    """Says a text a token at a time, the first tokens with these log-probabilities, else -0.1."""
    ids = tiny_tokenizer().encode(text, add_special_tokens=False)
    values = [*logprobs, *[-0.1] * len(ids)]

    def script(_: Any) -> list[Step]:
        told: list[Step] = [Tokens([i], logprob=v) for i, v in zip(ids, values, strict=False)]
        return [*told, Tokens([EOS], FinishReason.STOP, EOS, logprob=-0.1)]

    return script


def classifier(hard: str) -> RouteClassifier:
    """Says that prompts with this word are too hard for the small model."""
    weights = np.zeros(NUM_SLOTS, "<f4")
    for word, weight in ((hard, 10.0), ("easy", -10.0)):
        weights[slots_of(tool_tokenizer().encode(f" {word}", add_special_tokens=False))] = weight
    nothing = Judged(num=0, skipped=0.0, quality=0.0, cost=0.0)
    made = RouteClassifier(
        tiers=["small", "large"],
        threshold=0.5,
        bias=0.0,
        length_weight=0.0,
        weights=weights.tobytes(),
        digest="",
        held_out=HeldOut(large=nothing, cascade=nothing, classified=nothing, curve=[]),
    )
    return replace(made, digest=digest_of(made))


@dataclass
class Two:
    """A served cascade `auto` of a small model and a large one."""

    api: Harness
    small: FakeGenerator
    large: FakeGenerator

    async def chat(self, **body: Any) -> Any:
        async with self.api.chat(**{"model": "auto"} | body) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def text(self, **body: Any) -> str:
        return str((await self.chat(**body))["choices"][0]["message"]["content"])

    @property
    def outcomes(self) -> list[tuple[str, str]]:
        return [(model, outcome) for _, model, outcome in self.api.observer.tiers]


@asynccontextmanager
async def cascade(
    small: Script | FakeGenerator,
    tenants: Tenants | None = None,
    hooks: Mapping[str, Hook] = MappingProxyType({}),
    classifiers: Mapping[str, RouteClassifier] = MappingProxyType({}),
    **rule: Any,
) -> AsyncIterator[Two]:
    tokenizer = tool_tokenizer()
    first = small if isinstance(small, FakeGenerator) else FakeGenerator(small)
    last = FakeGenerator(says(LARGE))
    models = [
        make_model(first, tokenizer, ["small"]),
        make_model(last, tokenizer, ["large"], tenants=frozenset({"", "acme"})),
    ]
    tiers = [Tier(model="small", escalate=Escalation(**rule)), Tier(model="large")]
    auto = Cascade(
        names=("auto", "best"),
        created=0,
        tiers=tuple(tiers),
        needs_whole_answer=RegisteredCascade(tiers=tiers).needs_whole_answer,
        hooks=hooks,
        classifiers=classifiers,
    )
    catalog = Catalog(models, [auto])
    async with served(catalog=catalog, tenants=tenants) as api:
        yield Two(api, first, last)


@pytest.mark.parametrize(
    ("rule", "logprobs", "outcome"),
    [
        ({"mean_logprob": -0.5}, [], "answered"),
        ({"mean_logprob": -0.5}, [-6.0], "mean_logprob"),
        ({"min_logprob": -3.0}, [-2.9], "answered"),
        ({"min_logprob": -3.0}, [-0.1, -3.1], "min_logprob"),
        ({"min_logprob": -3.0, "first_tokens": 2}, [-0.1, -0.1, -9.0], "answered"),
        ({"mean_logprob": -1.0, "first_tokens": 2}, [-1.5, -1.5], "mean_logprob"),
        ({"margin": 0.9}, [], "answered"),  # the fake's likeliest tokens are 1 apart
        ({"margin": 1.1}, [], "margin"),
        ({"max_tokens": 100}, [], "answered"),
        ({"max_tokens": 3}, [], "max_tokens"),
    ],
)
async def test_each_rule(rule: dict[str, Any], logprobs: list[float], outcome: str) -> None:
    async with cascade(sure(SMALL, *logprobs), **rule) as two:
        answer = await two.chat()
        is_kept = outcome == "answered"
        assert answer["choices"][0]["message"]["content"] == (SMALL if is_kept else LARGE)
        assert answer["choices"][0]["logprobs"] is None, "only the rule looks at them"
        assert answer["model"] == ("small" if is_kept else "large")
        last = [] if is_kept else [("large", "answered")]
        assert two.outcomes == [("small", outcome), *last]
        assert len(two.large.generations) == len(last)


async def test_an_answer_cut_before_it_matches_its_grammar() -> None:
    wanted = {"response_format": {"type": "json_object"}, "max_tokens": 5}
    async with cascade(sure(SMALL), grammar=True) as two:
        await two.text(**wanted)
        await two.text(max_tokens=5)  # has none
    assert two.outcomes == [("small", "grammar"), ("large", "answered"), ("small", "answered")]


@pytest.mark.parametrize(
    ("text", "asked", "is_kept"),
    [
        (SMALL, {"tools": [TOOL]}, False),
        (CALL, {"tools": [TOOL]}, True),
        (SMALL, {"tools": [TOOL], "tool_choice": "none"}, True),
        (SMALL, {}, True),
    ],
)
async def test_a_tool_that_is_not_called(text: str, asked: dict[str, Any], is_kept: bool) -> None:
    async with cascade(sure(text), tool=True) as two:
        answer = await two.chat(**asked)
        assert answer["model"] == ("small" if is_kept else "large")
        assert bool(answer["choices"][0]["message"].get("tool_calls")) == (text == CALL)


class Shouts:
    """A hook that lets no answer pass which is not loud, or is to a loud question."""

    def escalates(self, prompt: str, answer: str) -> bool:
        return not answer.endswith("!") or "HI" in prompt


@pytest.mark.parametrize(
    ("asked", "said", "is_kept"),
    [("Hi", "Hello!", True), ("HI", "Hello!", False), ("Hi", "Hello", False)],
)
async def test_a_hook_says_whether_an_answer_is_good(asked: str, said: str, is_kept: bool) -> None:
    async with cascade(sure(said), hooks={"shouts": Shouts()}, hook="shouts") as two:
        text = await two.text(messages=[{"role": "user", "content": asked}])
    assert text == (said if is_kept else LARGE)
    assert two.outcomes[0] == ("small", "answered" if is_kept else "hook")


async def test_a_classifier_says_beforehand_whether_a_tier_is_asked() -> None:
    found = {"f": classifier("zebra")}
    async with cascade(sure(SMALL), classifiers=found, classifier="f") as two:
        answers = []
        for prompt in "xx easy", "xx zebra":
            async with two.api.complete(model="auto", prompt=prompt, max_tokens=40) as response:
                answers.append(await response.json())
        easy, hard = answers
        assert [easy["model"], hard["model"]] == ["small", "large"]
        assert [tier["model"] for tier in hard["usage"]["tiers"]] == ["large"]
    assert two.outcomes == [("small", "answered"), ("small", "classifier"), ("large", "answered")]
    rules = {"classifier": "f", "min_logprob": -5.0}
    async with (
        cascade(sure(SMALL, -9.0), classifiers=found, **rules) as two,
        two.api.complete(model="auto", prompt="xx easy", max_tokens=40) as response,
    ):
        assert response.status == 200
    assert two.outcomes == [("small", "min_logprob"), ("large", "answered")]


@pytest.mark.long
def test_a_classifier_of_other_tiers_or_none_gets_one_line(tmp_path: Path) -> None:
    file = tmp_path / "route.json"

    def made(first: str) -> list[Cascade]:
        tiers = [Tier(model=first, escalate=Escalation(classifier=str(file))), Tier(model="large")]
        return make_cascades({"auto": RegisteredCascade(tiers=tiers)})

    with pytest.raises(ConfigError, match=r"cascades\.auto: cannot read the classifier"):
        made("small")
    write_classifier(classifier("zebra"), file)
    (auto,) = made("small")
    assert not auto.needs_whole_answer
    with pytest.raises(ConfigError, match="fitted to the tiers small, large, and these are tiny"):
        made("tiny")


def test_hooks_are_found_by_their_entry_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path / "site")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/theirs_hooks.py").write_text(
        "class Never:\n    def escalates(self, prompt, answer): return False\n"
    )
    (tmp_path / "theirs/pyproject.toml").write_text(
        '[project]\nname = "theirs-hooks"\nversion = "1.2"\n'
        '[project.entry-points."pdserve.escalations"]\n'
        'never = "theirs_hooks:Never"\nnone = "builtins:dict"\n'
    )
    install(tmp_path / "theirs", tmp_path / "site")

    def made(hook: str) -> list[Cascade]:
        tiers = [Tier(model="small", escalate=Escalation(hook=hook)), Tier(model="large")]
        return make_cascades({"auto": RegisteredCascade(tiers=tiers)})

    (auto,) = made("never")
    assert auto.needs_whole_answer
    assert not auto.hooks["never"].escalates("", "")
    with pytest.raises(
        ConfigError, match=r"cascades\.auto: there is no hook 'nevr'; there are nev"
    ):
        made("nevr")
    with pytest.raises(ConfigError, match=r"theirs-hooks 1\.2.*makes a dict"):
        made("none")


async def test_log_probabilities_are_shown_as_asked_for() -> None:
    async with cascade(sure(SMALL), margin=0.5) as two:
        shown = (await two.chat(logprobs=True, top_logprobs=1))["choices"][0]["logprobs"]["content"]
        assert two.small.last.request.sampling.logprobs == 2
        assert {len(token["top_logprobs"]) for token in shown} == {1}
        refused = two.api.complete(model="auto", logprobs=1, logprob_token_ids=[3])
        async with refused as response:
            assert (response.status, (await response.json())["error"]["param"]) == (
                400,
                "logprob_token_ids",
            )


async def test_the_least_certain_of_several_answers_decides() -> None:
    scripts = iter([sure(SMALL), sure(SMALL, -9.0)])
    async with cascade(lambda request: next(scripts)(request), min_logprob=-5.0) as two:
        answer = await two.chat(n=2)
        texts = [choice["message"]["content"] for choice in answer["choices"]]
        assert texts == [LARGE, LARGE]


async def test_a_kept_answer_streams_once_its_first_tokens_are_there() -> None:
    gate = asyncio.Event()
    ids = tiny_tokenizer().encode(SMALL, add_special_tokens=False)

    def script(_: Any) -> list[Step]:
        rest = [Tokens(ids[4:]), Tokens([EOS], FinishReason.STOP, EOS)]
        return [*(Tokens([i]) for i in ids[:4]), Pause(until=gate), *rest]

    async with (
        cascade(script, mean_logprob=-1.0, first_tokens=3) as two,
        two.api.chat(model="auto", stream=True) as response,
    ):
        await response.content.readuntil(b"\n\n")
        assert not two.small.last.is_over
        gate.set()
        blocks = await response.read()
    chunks = [e for e in events_of(blocks) if isinstance(e, dict) and e["choices"]]
    told = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert SMALL.endswith(told)
    assert two.small.last.cancels == []


async def test_the_bill_has_each_tier() -> None:
    async with cascade(sure(SMALL, -9.0), min_logprob=-5.0) as two:
        usage = (await two.chat())["usage"]
        num_small = len(two.small.last.request.prompt.token_ids)
        assert usage["tiers"] == [
            {
                "model": "small",
                "prompt_tokens": num_small,
                "cached_tokens": 3,
                "completion_tokens": usage["tiers"][0]["completion_tokens"],
            },
            {
                "model": "large",
                "prompt_tokens": usage["prompt_tokens"],
                "cached_tokens": 3,
                "completion_tokens": usage["completion_tokens"],
            },
        ]
        assert usage["tiers"][0]["completion_tokens"] >= 1
        alone = await two.chat(model="large")
        assert "tiers" not in alone["usage"]
        assert alone["usage"]["completion_tokens"] == usage["completion_tokens"]


async def test_the_ledger_charges_each_tier_to_its_model(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(f'[tenants.acme]\nkeys = ["{hash_key("k")}"]\n')
    book = KeyBook(tmp_path / "keys.toml", {}, ("standard",), SystemClock())
    tenants = Tenants(book, Ledger(tmp_path / "usage"), "small", SystemClock())
    key = {"Authorization": "Bearer k"}
    async with cascade(sure(SMALL, -9.0), tenants, min_logprob=-5.0) as two:
        async with two.api.chat(key, model="auto") as response:
            usage = (await response.json())["usage"]["tiers"]
        two.small.script = lambda _: [NodeLost("gone")]
        async with two.api.chat(key, model="auto") as response:
            assert response.status == 502
    tenants.close()
    large, small = read_usage(tmp_path / "usage", "model")
    assert (small.requests, small.failed, large.requests, large.failed) == (1, 1, 1, 0)
    assert large.output_tokens == usage[1]["completion_tokens"]
    assert small.output_tokens == usage[0]["completion_tokens"]
    assert small.prompt_tokens == 2 * usage[0]["prompt_tokens"]


async def test_a_tenant_may_use_so_many_tokens_of_a_model(tmp_path: Path) -> None:
    """Each tier has a limit of its own; the model that does not answer is given nothing back."""
    (tmp_path / "keys.toml").write_text(
        f'[tenants.acme]\nkeys = ["{hash_key("k")}"]\ntokens_per_minute = 10000\n'
        "model_tokens_per_minute = { large = 20 }\n"
    )
    clock, ledger = ManualClock(), tmp_path / "usage"

    def opened() -> Tenants:
        book = KeyBook(tmp_path / "keys.toml", {}, ("standard",), SystemClock())
        return Tenants(book, Ledger(ledger), "small", clock, lambda: 1e9)

    key = {"Authorization": "Bearer k"}
    tenants = opened()
    async with cascade(sure(SMALL, -9.0), tenants, min_logprob=-5.0) as two:

        async def asked(model: str) -> Any:
            async with two.api.chat(key, model=model) as response:
                left = int(response.headers["x-ratelimit-remaining-tokens"])
                return response.status, await response.json(), left

        status, answer, _ = await asked("auto")
        large = answer["usage"]["tiers"][1]
        assert status == 200
        assert 17 <= large["prompt_tokens"] + large["completion_tokens"] <= 20
        *_, left = await asked("small")
        status, refused, after = await asked("auto")
        assert status == 429
        assert "'acme' may use 20 tokens of 'large' a minute" in refused["error"]["message"]
        small = answer["usage"]["tiers"][0]
        assert left - after == small["prompt_tokens"] + small["completion_tokens"]
        assert (await asked("small"))[0] == 200
        tenants.close()
    tenants = opened()  # what is owed outlives the coordinator
    async with cascade(sure(SMALL, -9.0), tenants, min_logprob=-5.0) as two:
        assert (await asked("large"))[0] == 429
        clock.advance(60.0)
        assert (await asked("large"))[0] == 200
    tenants.close()


async def test_what_the_next_tier_is_told() -> None:
    async with cascade(sure(SMALL, -9.0), mean_logprob=-0.2) as two:
        await two.chat(seed=5)
        first, second = two.small.last.request, two.large.last.request
        assert tiny_tokenizer().decode(list(second.prediction)) == SMALL
        assert second.request_id == f"{first.request_id}-t1"
        assert second.waited_s == 0.0
        assert (first.sampling.logprobs, second.sampling.logprobs) == (0, None)
        own = {"type": "content", "content": "mine"}
        await two.chat(prediction=own)
        assert tiny_tokenizer().decode(list(two.large.last.request.prediction)) == "mine"
    assert two.small.last.cancels == ["another model answers"]


async def test_a_prompt_that_does_not_fit_goes_on_to_the_next_tier() -> None:
    small = FakeGenerator(sure(SMALL), max_model_len=20)
    async with cascade(small, mean_logprob=-0.5) as two:
        long = [{"role": "user", "content": "words and words " * 6}]
        answer = await two.chat(messages=long)
        assert answer["model"] == "large"
        assert [tier["model"] for tier in answer["usage"]["tiers"]] == ["large"]
        two.large.max_model_len = 20
        async with two.api.chat(model="auto", messages=long) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (400, "context_length_exceeded")
    assert two.outcomes == [("small", "context"), ("large", "answered"), ("small", "context")]


@pytest.mark.parametrize("error", [Overloaded("full", 1.0), NodeLost("gone")])
async def test_a_tier_that_fails_is_no_reason_for_the_next(error: Exception) -> None:
    """What is answered depends on the prompt, and not on who is busy or has died."""
    async with cascade(lambda _: [error], mean_logprob=-0.5) as two:
        async with two.api.chat(model="auto") as response:
            assert response.status in (429, 502)
        two.small.start_error = error
        async with two.api.chat(model="auto") as response:
            assert response.status in (429, 502)
    assert not two.large.generations


async def test_a_client_that_hangs_up_ends_the_attempt() -> None:
    never = asyncio.Event()
    async with cascade(lambda _: [Tokens([5]), Pause(until=never)], mean_logprob=-0.5) as two:
        asking = asyncio.create_task(two.chat())
        await two.small.started.wait()
        asking.cancel()
        await two.api.observer.over.wait()
        assert two.small.last.cancels == ["the call has failed"]
    assert not two.large.generations


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/responses"])
async def test_every_api_answers_from_the_tier(path: str) -> None:
    asked: dict[str, Any] = {"model": "best", "max_tokens": 40}
    if path == "/v1/messages":
        asked["messages"] = [{"role": "user", "content": "Hi"}]
    elif path == "/v1/responses":
        asked = {"model": "best", "input": "Hi"}
    else:
        asked["prompt"] = "Hi"
    for logprobs, expected in ((), SMALL), ((-9.0,), LARGE):
        async with (
            cascade(sure(SMALL, *logprobs), min_logprob=-5.0) as two,
            two.api.client.post(path, json=asked) as response,
        ):
            body = await response.text()
            assert response.status == 200, body
            assert expected in body
            tiers = [tier["model"] for tier in json.loads(body)["usage"]["tiers"]]
            assert tiers == (["small"] if expected == SMALL else ["small", "large"])


async def test_models_tell_of_cascades(tmp_path: Path) -> None:
    async with cascade(sure(SMALL), mean_logprob=-0.5) as two:
        async with two.api.client.get("/v1/models") as response:
            listed = {one["id"]: one for one in (await response.json())["data"]}
        async with two.api.client.get("/v1/models/best") as response:
            best = await response.json()
        assert list(listed) == ["small", "large", "auto", "best"]
        assert (best["tiers"], best["needs_whole_answer"]) == (["small", "large"], True)
        assert "tiers" not in listed["small"]
        version = {"anthropic-version": "2023-06-01"}
        async with two.api.client.get("/v1/models", headers=version) as response:
            shown = (await response.json())["data"]
        assert [one["id"] for one in shown] == list(listed)
        async with two.api.client.post(
            "/tokenize", json={"model": "auto", "prompt": "Hi"}
        ) as response:
            message = (await response.json())["error"]["message"]
            assert (response.status, "name one of its tiers (small, large)" in message) == (
                400,
                True,
            )


# ---- streams that go on at another coordinator ---------------------------------------------------


def ids_of(blocks: list[str]) -> list[str]:
    return [b.partition("\n")[0].removeprefix("id: ") for b in blocks if b.startswith("id: ")]


async def stream(two: Two, last: str | None = None) -> list[str]:
    headers = {"Idempotency-Key": "k"} | ({"Last-Event-ID": last} if last else {})
    options = {"include_usage": True}
    async with two.api.chat(headers, model="auto", stream=True, stream_options=options) as response:
        assert response.status == 200, await response.text()
        blocks = (await response.text()).split("\n\n")[:-1]
    return [b.partition('"created":')[0] + b.partition('"model":')[2] for b in blocks]


@pytest.mark.parametrize("logprob", [-0.1, -9.0])
async def test_a_stream_goes_on_in_its_tier_at_another_coordinator(logprob: float) -> None:
    async with cascade(sure(SMALL, logprob), min_logprob=-5.0) as two:
        whole = await stream(two)
        asked = (two.large if logprob < -5 else two.small).last.request.request_id
    ids = ids_of(whole)
    assert {i.partition(":")[0] for i in ids} == {"t1" if logprob < -5 else "t"}
    # The other one would decide otherwise: the decision comes with the client.
    other = sure(SMALL, -9.0 if logprob > -5 else -0.1)
    async with cascade(other, min_logprob=-5.0) as two:
        rest = await stream(two, ids[3])
        came_from = two.large if logprob < -5 else two.small
        assert came_from.last.request.request_id == asked
    assert [b for b in rest if "usage" not in b] == [b for b in whole[4:] if "usage" not in b]
    async with cascade(other, min_logprob=-5.0) as two:
        headers = {"Idempotency-Key": "k", "Last-Event-ID": "t1.2:3"}
        async with two.api.chat(headers, model="auto", stream=True) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, "Last-Event-ID")
