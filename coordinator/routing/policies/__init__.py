"""The policies that choose a node among candidates.

Those from `deflection` on are published rules of adaptive mode, as baselines of our own rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from coordinator.routing.candidates import RoutingPolicy
from coordinator.routing.policies.conserve import Conserve
from coordinator.routing.policies.deflection import Deflection
from coordinator.routing.policies.plain import (
    LeastLoaded,
    PowerOfTwo,
    Predicted,
    RoundRobin,
    Uniform,
)
from coordinator.routing.policies.ppd import Ppd
from coordinator.routing.policies.prefix_affinity import PrefixAffinity
from coordinator.routing.policies.prfaas import Prfaas
from pdserve.settings.config import ROUTERS

__all__ = ["make_policy"]

# Installed packages add to these (`pdserve.routers`), and are called alike.
_POLICIES: Final[dict[str, Callable[[], RoutingPolicy]]] = {
    "predicted": Predicted,
    "least-loaded": LeastLoaded,
    "power-of-two": PowerOfTwo,
    "round-robin": RoundRobin,
    "random": Uniform,
    "prefix-affinity": PrefixAffinity,
    "deflection": Deflection,
    "conserve": Conserve,
    "ppd": Ppd,
    "prfaas": Prfaas,
}


def make_policy(name: str) -> RoutingPolicy:
    """Return a new policy by its name.

    Raises:
        ConfigError: the package that the policy comes from is broken.
    """
    if name in _POLICIES:
        return _POLICIES[name]()
    return ROUTERS.make(RoutingPolicy, name)  # type: ignore[type-abstract]
