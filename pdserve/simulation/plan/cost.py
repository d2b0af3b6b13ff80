"""What a deployment's tokens cost, from the prices of its nodes and what they did."""

from __future__ import annotations

import msgspec

from pdserve.simulation.plan.config import Prices
from pdserve.simulation.predict.deployment import Deployment, Result


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Costs in the currency of the prices. Idle time is apart: no token has caused it.

    Time of prompts is shared by their uncached tokens. A cached token takes no time in a step, as
    far as the calibration can tell it apart from the rest, so it costs what memory it takes: here
    nothing.
    """

    per_hour: float
    idle_share: float  # of the cost per hour
    per_million_uncached: float | None  # input tokens; None: there are none
    per_million_cached: float | None
    per_million_output: float | None


def price_per_hour(deployment: Deployment, prices: Prices) -> float:
    """Return the cost of an hour of all nodes; co-located ones are decode nodes."""
    if deployment.mode == "colocated":
        return deployment.num_nodes * prices.decode
    return deployment.prefill * prices.prefill + deployment.decode * prices.decode


def cost_of(deployment: Deployment, result: Result, prices: Prices) -> Cost:
    """Return the costs of a run."""
    per_hour = price_per_hour(deployment, prices)
    price = {name: _price(name, prices) for name in result.busy}
    prompts = sum(price[name] * share for name, share in result.prompt_busy.items())
    busy = sum(price[name] * share for name, share in result.busy.items())
    hours = result.seconds / 3600
    uncached = result.prompt_tokens - result.cached_tokens
    return Cost(
        per_hour=per_hour,
        idle_share=1 - busy / per_hour,
        per_million_uncached=_per_million(prompts * hours, uncached),
        per_million_cached=0.0 if result.cached_tokens else None,
        per_million_output=_per_million((busy - prompts) * hours, result.output_tokens),
    )


def _price(node: str, prices: Prices) -> float:
    return prices.prefill if node.startswith("prefill") else prices.decode


def _per_million(cost: float, num_tokens: int) -> float | None:
    return 1e6 * cost / num_tokens if num_tokens else None
