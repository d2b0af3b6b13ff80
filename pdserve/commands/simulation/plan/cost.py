"""What a deployment's tokens cost, from the prices of its nodes and what they did."""

from __future__ import annotations

from pdserve.commands.simulation.predict.deployment import Deployment, Result
from pdserve.shared.costs import Prices, TokenCosts, Work


def price_per_hour(deployment: Deployment, prices: Prices) -> float:
    """Return the cost of an hour of all nodes; co-located ones are decode nodes."""
    if deployment.mode == "colocated":
        return deployment.num_nodes * prices.decode
    return deployment.prefill * prices.prefill + deployment.decode * prices.decode


def cost_of(deployment: Deployment, result: Result, prices: Prices) -> TokenCosts:
    """Return the costs of a run."""
    price = {name: _price(name, prices) for name in result.busy}
    hours = result.seconds / 3600
    work = Work(
        seconds=result.seconds,
        paid=price_per_hour(deployment, prices) * hours,
        busy=hours * sum(price[name] * share for name, share in result.busy.items()),
        prompts=hours * sum(price[name] * share for name, share in result.prompt_busy.items()),
        uncached_tokens=result.prompt_tokens - result.cached_tokens,
        cached_tokens=result.cached_tokens,
        output_tokens=result.output_tokens,
    )
    return TokenCosts.of(work)


def _price(node: str, prices: Prices) -> float:
    return prices.prefill if node.startswith("prefill") else prices.decode
