"""What tokens cost, on a manual clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from coordinator.api.answer.bodies import TierUsage
from coordinator.api.observer import RequestSummary
from coordinator.observers.costs import WINDOW_S, Costs
from pdserve.protocol import NodeRole
from pdserve.shared.clock import ManualClock
from pdserve.shared.costs import Prices

PRICES = Prices(prefill=7.2, decode=3.6)


def member(role: NodeRole, busy: float, prompts: float, coordinators: int = 1) -> Any:
    load = SimpleNamespace(busy_share=busy, prompt_share=prompts, num_coordinators=coordinators)
    return SimpleNamespace(role=role, load=load)


def call(prompt: int, cached: int, output: int, ttft_s: float | None = 0.1) -> RequestSummary:
    return RequestSummary(
        request_id="r",
        endpoint="/v1/completions",
        slo=None,
        is_streaming=True,
        status=200,
        error_code=None,
        finish_reason="length",
        num_prompt_tokens=prompt,
        num_cached_tokens=cached,
        num_completion_tokens=output,
        e2e_s=1.0,
        ttft_s=ttft_s,
        tpot_s=None,
    )


def passed(costs: Costs, clock: ManualClock, seconds: int) -> None:
    for _ in range(seconds):
        clock.advance(1.0)
        costs.tick()


def test_nothing_is_known_at_first() -> None:
    assert Costs(PRICES, [], ManualClock()).now() is None


def test_busy_time_is_paid_by_tokens_and_the_rest_is_idle() -> None:
    clock = ManualClock()
    nodes = [member(NodeRole.PREFILL, 0.5, 0.5), member(NodeRole.DECODE, 0.75, 0.25)]
    costs = Costs(PRICES, nodes, clock)
    costs.call_ended(call(3000, 1000, 400))
    costs.call_ended(call(2000, 0, 600))
    passed(costs, clock, 100)
    found = costs.now()
    assert found is not None
    assert found.per_hour == pytest.approx(7.2 + 3.6)
    # In 100 s: prefill 0.2, half of it busy; decode 0.1, a quarter for prompts, half for decodes.
    assert found.idle_share == pytest.approx((0.1 + 0.025) / 0.3)
    assert found.per_million_uncached == pytest.approx(1e6 * (0.1 + 0.025) / 4000)
    assert found.per_million_output == pytest.approx(1e6 * 0.05 / 1000)
    assert found.per_million_cached == 0.0
    tokens = (4000 * found.per_million_uncached + 1000 * found.per_million_output) / 1e6
    paid = found.per_hour * 100 / 3600
    assert tokens + found.idle_share * paid == pytest.approx(paid), "all that is paid is shown"


def test_tokens_count_for_the_nodes_that_computed_them() -> None:
    """Those of tiers that lost, too, but not those of a server elsewhere."""
    clock = ManualClock()
    costs = Costs(PRICES, [member(NodeRole.DECODE, 1.0, 0.5)], clock)
    lost = [TierUsage("small", 300, 100, 40)]
    costs.call_ended(structs.replace(call(1000, 0, 60), lost_tiers=lost))
    costs.call_ended(structs.replace(call(5000, 0, 900), lost_tiers=lost, is_elsewhere=True))
    passed(costs, clock, 100)
    found = costs.now()
    assert found is not None
    assert found.per_million_uncached == pytest.approx(1e6 * 0.05 / (200 + 1000 + 200))
    assert found.per_million_output == pytest.approx(1e6 * 0.05 / (40 + 60 + 40))


def test_an_idle_cluster_costs_without_tokens() -> None:
    clock = ManualClock()
    costs = Costs(PRICES, [member(NodeRole.DECODE, 0.0, 0.0)], clock)
    costs.call_ended(call(10, 0, 0, ttft_s=None))  # it was refused
    passed(costs, clock, 10)
    found = costs.now()
    assert found is not None
    assert (found.idle_share, found.per_million) == (1.0, {})


def test_what_is_long_ago_does_not_count() -> None:
    clock = ManualClock()
    nodes = [member(NodeRole.DECODE, 1.0, 0.0)]
    costs = Costs(PRICES, nodes, clock)
    costs.call_ended(call(0, 0, 1_000_000))
    passed(costs, clock, 10)
    nodes.append(member(NodeRole.DECODE, 1.0, 0.0))
    costs.call_ended(call(0, 0, 10))
    passed(costs, clock, int(WINDOW_S))
    found = costs.now()
    assert found is not None
    assert found.per_hour == pytest.approx(7.2)
    assert found.per_million_output == pytest.approx(1e6 * 7.2 * WINDOW_S / 3600 / 10)


def test_an_hour_costs_what_the_nodes_of_now_cost() -> None:
    """Not what those of the last minutes did on average."""
    clock = ManualClock()
    nodes: list[Any] = []
    costs = Costs(PRICES, nodes, clock)
    passed(costs, clock, 100)
    nodes.append(member(NodeRole.DECODE, 0.0, 0.0))
    passed(costs, clock, 10)
    found = costs.now()
    assert found is not None
    assert found.per_hour == pytest.approx(3.6)
    assert found.idle_share == 1.0


def test_coordinators_share_what_nodes_cost() -> None:
    clock = ManualClock()
    costs = Costs(PRICES, [member(NodeRole.DECODE, 1.0, 0.0, coordinators=2)], clock)
    passed(costs, clock, 10)
    found = costs.now()
    assert found is not None
    assert found.per_hour == pytest.approx(1.8)


@pytest.mark.parametrize("text", ["decode", "decode=0", "decode=x", "encode=1", "decode=inf"])
def test_what_is_no_price_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no price"):
        Prices.of([text])


def test_prices_that_are_not_given_are_one() -> None:
    assert Prices.of(["decode=0.5"]) == Prices(prefill=1.0, decode=0.5)
