"""Prefill policies by name. The prompt orders are in `pdserve.engine.prompts`."""

from __future__ import annotations

from collections.abc import Callable

from pdserve.engine.prompts import make_prompt_order
from pdserve.engine.prompts.order import BatchSizes
from pdserve.engine.scheduler import Policy
from pdserve.measured.perf_model import PerfModel
from pdserve.settings.config import EngineConfig, PolicyConfig
from pdserve.shared.clock import Clock
from prefill_node.policies.prompt_batches import PromptBatches


def make_prefill_policy(
    policy: PolicyConfig,
    engine: EngineConfig,
    perf: PerfModel,
    clock: Clock,
    num_kept_free: int = 0,
    num_pinned: Callable[[], int] = lambda: 0,
) -> Policy:
    """Make the policy that the config names.

    A prompt is begun only if `num_kept_free` blocks stay free beside it; `num_pinned` returns the
    number of blocks held for decode nodes to pull.
    """
    order = make_prompt_order(policy.prefill_policy, perf, clock, engine.token_budget)
    sizes = BatchSizes(
        perf, engine.token_budget, policy.prefill_chunk, gives_way=order.rule.gives_way
    )
    return PromptBatches(order, sizes, perf, engine.max_batch_size, num_kept_free, num_pinned)
