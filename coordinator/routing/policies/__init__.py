"""The policies that choose a node among candidates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from coordinator.routing.candidates import RoutingPolicy
from coordinator.routing.policies.plain import (
    LeastLoaded,
    PowerOfTwo,
    Predicted,
    RoundRobin,
    Uniform,
)
from coordinator.routing.policies.prefix_affinity import PrefixAffinity
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
}


def make_policy(name: str) -> RoutingPolicy:
    """Return a new policy by its name.

    Raises:
        ConfigError: the package that the policy comes from is broken.
    """
    if name in _POLICIES:
        return _POLICIES[name]()
    return ROUTERS.make(RoutingPolicy, name)  # type: ignore[type-abstract]
