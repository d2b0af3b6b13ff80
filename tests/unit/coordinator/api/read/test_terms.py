"""Service classes and time-outs: what a call says about them, and what the cluster is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import openai
import pytest

from coordinator.api.config import ApiConfig
from coordinator.api.context import RequestTrace
from coordinator.api.read.body import convert_request
from coordinator.api.read.chat import ChatRequest
from coordinator.api.read.terms import ServiceTerms, service_terms
from coordinator.tenants import Admitted
from coordinator.tenants.identity import Tenant
from pdserve.protocol import Slo
from pdserve.shared.errors import DeadlineExceeded, SloUnreachable
from pdserve.shared.slo import parse_slo_classes
from tests.fakes.generator import MODEL, FakeGenerator, says
from tests.matrix import matrix
from tests.unit.coordinator.api.harness import is_error_body, served

MESSAGES: Any = [{"role": "user", "content": "x"}]
PROMISING = parse_slo_classes(
    ["interactive ttft=2 tpot=0.1 priority=2", "standard priority=1", "batch"], "standard"
)
INTERACTIVE = Slo(name="interactive", priority=2, ttft_s=2.0, tpot_s=0.1, hold_s=1.8)


@pytest.mark.parametrize(
    ("headers", "body", "name"),
    matrix(
        [
            ({}, {}, "standard"),
            ({}, {"slo_class": "interactive"}, "interactive"),
            ({"x-slo-class": "batch"}, {}, "batch"),
            ({"X-SLO-Class": "batch"}, {"slo_class": "interactive"}, "interactive"),
            ({}, {"slo_class": None}, "standard"),
            ({}, {"service_tier": "priority"}, "interactive"),
            ({}, {"service_tier": "fast"}, "interactive"),
            ({}, {"service_tier": "flex"}, "batch"),
            ({}, {"service_tier": "auto"}, "standard"),
            ({}, {"service_tier": "default"}, "standard"),
            ({}, {"service_tier": "priority", "slo_class": "batch"}, "batch"),
            ({"X-SLO-Class": "standard"}, {"service_tier": "flex"}, "standard"),
        ],
        6,
    ),
)
@pytest.mark.parametrize("kind", ["chat", "complete"])
async def test_a_call_names_its_class(
    headers: dict[str, str], body: dict[str, Any], name: str, kind: str
) -> None:
    async with served() as api, getattr(api, kind)(headers, **body) as response:
        assert response.status == 200
        told = (await response.json()).get("service_tier")
    asked = body.get("service_tier") if kind == "chat" else None
    is_given = name == {"flex": "batch"}.get(asked or "", "interactive")
    assert told == (asked and (asked if is_given else "default")), "the tier that was used"
    assert api.generator.last.request.slo.name == name
    assert api.observer.finished[0].slo == api.generator.last.request.slo


async def test_a_class_says_what_is_promised() -> None:
    async with served(classes=PROMISING) as api, api.chat(slo_class="interactive") as response:
        await response.read()
    request = api.generator.last.request
    assert request.slo == INTERACTIVE
    assert 0 < request.waited_s < 1
    assert request.deadline_s == 0


@pytest.mark.parametrize(
    ("headers", "body", "param"),
    [
        ({}, {"slo_class": "gold"}, "slo_class"),
        ({}, {"slo_class": ""}, "slo_class"),
        ({"X-SLO-Class": "gold"}, {}, "X-SLO-Class"),
    ],
)
async def test_an_unknown_class_is_refused_with_those_that_there_are(
    headers: dict[str, str], body: dict[str, Any], param: str
) -> None:
    async with served() as api, api.chat(headers, **body) as response:
        answer = await response.json()
    assert response.status == 400
    assert is_error_body(answer)
    assert answer["error"]["param"] == param
    assert "interactive, standard, batch" in answer["error"]["message"]
    assert api.generator.generations == []
    assert api.observer.finished[0].slo is None


CLASSES = parse_slo_classes(["gold priority=2 weight=9", "usual priority=1", "bulk"], "usual")


def told(body: dict[str, Any], tenant: Tenant) -> Slo:
    """What the cluster is told of a tenant's call."""
    return terms_of(body, tenant).slo


def terms_of(body: dict[str, Any], tenant: Tenant) -> ServiceTerms:
    context: Any = SimpleNamespace(classes=CLASSES, config=ApiConfig())
    caller = Admitted(tenant, "", None)
    trace = RequestTrace(unique="u", request_id="r", received_s=0.0, caller=caller)
    fields = convert_request({"model": "m", "messages": MESSAGES, **body}, ChatRequest)
    return service_terms(fields, {}, context, trace)


@pytest.mark.parametrize("name", ["gold", "usual", "bulk"])
@pytest.mark.parametrize("priority", [-(2**30), -1, 0, 1, 9, 2**30])
def test_without_classes_of_its_own_no_tenant_takes_precedence(name: str, priority: int) -> None:
    slo = told({"slo_class": name, "priority": priority}, Tenant(name="eve", weight=2.0))
    assert slo.name == name
    assert slo.priority <= 1
    assert slo.weight == 2.0
    assert slo.payer == told({}, Tenant(name="eve")).payer
    tier = {"service_tier": "priority"}
    assert told(tier, Tenant(name="eve")).priority == 1
    assert told(tier, Tenant(name="ann", default_class="gold")).priority == 2
    assert told(tier, Tenant(name="bob", classes=["gold"])).priority == 2
    assert told(tier, Tenant(name="owner", is_operator=True)).priority == 2
    assert told(tier, Tenant()).priority == 2


@pytest.mark.parametrize("tier", ["priority", "fast", "ultrafast", "flex", "auto", "default", None])
@pytest.mark.parametrize("tenant", [
    Tenant(), Tenant(name="eve"), Tenant(name="eve", weight=2.0),
    Tenant(name="ann", default_class="gold"), Tenant(name="bob", classes=["gold", "bulk"]),
])  # fmt: skip
def test_a_tier_is_told_if_the_call_has_it(tier: str | None, tenant: Tenant) -> None:
    terms = terms_of({"service_tier": tier}, tenant)
    named = CLASSES.lowest if tier == "flex" else CLASSES.highest
    is_given = tier not in ("auto", "default", None) and (
        (terms.slo.name, terms.slo.priority) == (named.name, named.priority)
    )
    assert terms.tier == (tier if is_given else "default")
    assert is_given or tier != "flex"
    assert is_given == (tenant.name != "eve") or tier not in ("priority", "fast", "ultrafast")


def test_priorities_keep_their_order_and_are_few() -> None:
    asked = sorted({*range(-99, 9999), *(s * 2**e for e in range(30) for s in (-1, 1))})
    given = [told({"priority": priority}, Tenant()).priority for priority in asked]
    assert given == sorted(given, reverse=True)
    assert len(set(given)) <= 2 * (8 + 7) + 1
    exact = [told({"priority": priority}, Tenant()).priority for priority in range(9)]
    assert exact == [1 - priority for priority in range(9)]


async def test_a_timeout_reaches_the_cluster_less_what_has_passed() -> None:
    async with served() as api, api.chat({"X-Request-Timeout": "30"}) as response:
        assert response.status == 200
    assert 25 < api.generator.last.request.deadline_s < 30


async def test_all_answers_of_a_call_have_one_timeout() -> None:
    generator = FakeGenerator(says("Hi"))
    async with served(generator) as api, api.chat({"X-Request-Timeout": "30"}, n=2) as response:
        assert response.status == 200
    first, second = (g.request.deadline_s for g in generator.generations)
    assert 25 < second == first


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e999", "soon", "", "5s"])
async def test_a_timeout_that_is_none_is_refused(text: str) -> None:
    async with served() as api, api.complete({"X-Request-Timeout": text}) as response:
        answer = await response.json()
    assert response.status == 400
    assert is_error_body(answer)
    assert answer["error"]["param"] == "X-Request-Timeout"


async def test_a_request_that_is_late_already_is_not_begun() -> None:
    async with served() as api, api.chat({"X-Request-Timeout": "1e-9"}) as response:
        answer = await response.json()
    assert response.status == 504
    assert answer["error"]["code"] == "deadline_exceeded"
    assert api.generator.generations == []


def test_time_runs_from_receipt() -> None:
    terms = ServiceTerms(INTERACTIVE, received_s=100.0, timeout_s=5.0)
    assert terms.waited_s(101.5) == 1.5
    assert terms.deadline_s(101.5) == 3.5
    with pytest.raises(DeadlineExceeded, match="5 s"):
        terms.deadline_s(105.0)
    assert ServiceTerms(INTERACTIVE, 100.0, 0.0).deadline_s(1000.0) == 0.0


@pytest.mark.parametrize(
    ("predicted_s", "told"), [(0.0, "7"), (0.01, "1"), (1.0, "1"), (1.01, "2"), (41.5, "42")]
)
async def test_retry_after_is_as_predicted_in_whole_seconds(predicted_s: float, told: str) -> None:
    generator = FakeGenerator(start_error=SloUnreachable("too slow", predicted_s))
    async with served(generator, retry_after_s=7) as api, api.chat() as response:
        answer = await response.json()
    assert response.status == 429
    assert response.headers["Retry-After"] == told
    assert answer["error"]["code"] == "slo_unreachable"
    assert answer["error"]["type"] == "rate_limit_error"
    assert api.observer.finished[0].slo is not None


async def test_the_sdk_can_say_all_of_it() -> None:
    async with (
        served(classes=PROMISING) as api,
        openai.AsyncOpenAI(base_url=api.base_url, api_key="-") as client,
    ):
        await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            service_tier="priority",
            extra_headers={"X-Request-Timeout": "30"},
        )
        assert api.generator.last.request.slo == INTERACTIVE
        assert api.generator.last.request.deadline_s > 25
        await client.completions.create(model=MODEL, prompt="x", extra_body={"slo_class": "batch"})
        assert api.generator.last.request.slo.name == "batch"


@pytest.mark.parametrize(
    ("body", "priority"),
    [
        ({"priority": 0}, 1),
        ({"priority": 5}, -4),
        ({"priority": -1}, 2),
        ({"priority": -(2**30)}, 2),
        ({"priority": -1, "slo_class": "batch"}, 1),
    ],
)
async def test_a_priority_counts_from_that_of_the_class(
    body: dict[str, Any], priority: int
) -> None:
    """Lower goes first, as in vLLM; no call gets beyond the highest class."""
    async with served() as api, api.chat(**body) as response:
        assert response.status == 200
    assert api.generator.last.request.slo.priority == priority
