"""Decode policies by name: batch size, and which prompts are prefilled beside the decodes."""

from __future__ import annotations

from typing import Final

from decode_node.policies.decodes_first import DecodesFirst
from decode_node.policies.interface import DecodePolicy
from decode_node.policies.max_batch import MaxBatch
from decode_node.policies.slack_batch import SlackBatch
from decode_node.policies.static import Static
from decode_node.policies.tpot_cap import TpotCap
from pdserve.clock import Clock
from pdserve.config import DecodePolicyName, EngineConfig, PolicyConfig
from pdserve.perf_model import PerfModel

__all__ = ["DecodePolicy", "make_decode_policy"]

_POLICIES: Final[dict[DecodePolicyName, type[DecodesFirst]]] = {
    "max-batch": MaxBatch,
    "tpot-cap": TpotCap,
    "slack-batch": SlackBatch,
    "static": Static,
}


def make_decode_policy(
    policy: PolicyConfig, engine: EngineConfig, perf: PerfModel, clock: Clock
) -> DecodePolicy:
    """Make the policy that `policy.decode_policy` names.

    Args:
        policy: names and settings.
        engine: limits of a step.
        perf: the node's performance model, which is corrected while the node runs.
        clock: the node's clock.
    """
    return _POLICIES[policy.decode_policy](policy, engine, perf, clock)
