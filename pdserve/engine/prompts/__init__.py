"""The order in which prompts are prefilled. Shared by prefill and decode nodes."""

from __future__ import annotations

from pdserve.clock import Clock
from pdserve.config import PrefillPolicyName
from pdserve.engine.prompts.arrival import Arrival
from pdserve.engine.prompts.buckets import Buckets
from pdserve.engine.prompts.order import PromptOrder, PromptRule
from pdserve.engine.prompts.shortest import ShortestFirst
from pdserve.engine.prompts.slack import DueWithSlack
from pdserve.fair_share import FairShare
from pdserve.perf_model import PerfModel


def make_prompt_order(
    name: PrefillPolicyName,
    perf: PerfModel,
    clock: Clock,
    token_budget: int,
    shares: FairShare | None = None,
) -> PromptOrder:
    """Create the prompt order with this name. Predictions assume chunks of `token_budget`.

    With `shares`, service charged elsewhere counts as well: on decode nodes, that of decode tokens.
    """
    rule: PromptRule
    match name:
        case "fcfs-budget":
            rule = Arrival()
        case "sjf-aging":
            rule = ShortestFirst(perf, token_budget)
        case "edf-slack":
            rule = DueWithSlack(perf, token_budget, clock)
        case "buckets":
            rule = Buckets()
    return PromptOrder(rule, shares or FairShare(), perf, clock, token_budget)
