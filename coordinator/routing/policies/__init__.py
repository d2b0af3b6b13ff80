"""How a node is chosen among candidates: one small file for each policy."""

from __future__ import annotations

from coordinator.routing.candidates import Policy
from coordinator.routing.policies.least_loaded import LeastLoaded
from coordinator.routing.policies.power_of_two import PowerOfTwo
from coordinator.routing.policies.predicted import Predicted
from coordinator.routing.policies.prefix_affinity import PrefixAffinity
from coordinator.routing.policies.round_robin import RoundRobin
from coordinator.routing.policies.uniform import Uniform
from pdserve.config import RouterName

__all__ = ["make_policy"]


def make_policy(name: RouterName) -> Policy:
    """The policy of that name."""
    match name:
        case "predicted":
            return Predicted()
        case "least-loaded":
            return LeastLoaded()
        case "power-of-two":
            return PowerOfTwo()
        case "round-robin":
            return RoundRobin()
        case "random":
            return Uniform()
        case "prefix-affinity":
            return PrefixAffinity()
