"""The order in which prompts are prefilled. Shared by prefill and decode nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pdserve.engine.prompts.order import DueWithSlack, PromptOrder, PromptRule
from pdserve.engine.prompts.short_apart import ShortApart
from pdserve.engine.prompts.shortest import Arrival, Buckets, ShortestFirst
from pdserve.measured.perf_model import PerfModel
from pdserve.settings.config import PREFILL_POLICIES
from pdserve.shared.clock import Clock
from pdserve.shared.fair_share import FairShare

# Installed packages add to these (`pdserve.prefill_policies`), and are called alike.
_RULES: Final[dict[str, Callable[[PerfModel, int, Clock], PromptRule]]] = {
    "fcfs-budget": lambda perf, token_budget, clock: Arrival(),
    "sjf-aging": lambda perf, token_budget, clock: ShortestFirst(perf, token_budget),
    "edf-slack": DueWithSlack,
    "buckets": lambda perf, token_budget, clock: Buckets(),
    "laps": lambda perf, token_budget, clock: ShortApart(perf, token_budget),
}


def make_prompt_order(
    name: str,
    perf: PerfModel,
    clock: Clock,
    token_budget: int,
    shares: FairShare | None = None,
) -> PromptOrder:
    """Create the prompt order with this name. Predictions assume chunks of `token_budget`.

    With `shares`, service charged elsewhere counts as well: on decode nodes, that of decode tokens.

    Raises:
        ConfigError: the package that the rule comes from is broken.
    """
    made_of = (perf, token_budget, clock)
    if name in _RULES:
        rule = _RULES[name](*made_of)
    else:
        rule = PREFILL_POLICIES.make(PromptRule, name, *made_of)  # type: ignore[type-abstract]
    return PromptOrder(rule, shares or FairShare(), perf, clock, token_budget)
