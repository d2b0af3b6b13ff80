"""The policies that choose a node among candidates, one file each."""

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
    """Return a new policy by its name."""
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
