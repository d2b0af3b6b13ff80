"""Decode policies by name: batch size, and which prompts are prefilled beside the decodes."""

from __future__ import annotations

from typing import Final

from decode_node.policies.decodes_first import DecodesFirst, MaxBatch, TpotCap
from decode_node.policies.interface import DecodePolicy
from decode_node.policies.shortest_remaining import ShortestRemaining
from decode_node.policies.slack_batch import SlackBatch
from decode_node.policies.static import Static
from pdserve.measured.perf_model import PerfModel
from pdserve.settings.config import DECODE_POLICIES, EngineConfig, PolicyConfig
from pdserve.shared.clock import Clock

__all__ = ["DecodePolicy", "make_decode_policy"]

# Installed packages add to these (`pdserve.decode_policies`), and are called alike.
_POLICIES: Final[dict[str, type[DecodesFirst]]] = {
    "max-batch": MaxBatch,
    "tpot-cap": TpotCap,
    "slack-batch": SlackBatch,
    "static": Static,
    "shortest-remaining": ShortestRemaining,
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

    Raises:
        ConfigError: the package that the policy comes from is broken.
    """
    name = policy.decode_policy
    if name in _POLICIES:
        return _POLICIES[name](policy, engine, perf, clock)
    arguments = (policy, engine, perf, clock)
    return DECODE_POLICIES.make(DecodePolicy, name, *arguments)  # type: ignore[type-abstract]
