"""A cascade as the API sees it: a name for several models, of which the first are asked first."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from coordinator.external.endpoint import Endpoint
from pdserve.settings.cascades import ESCALATIONS, RegisteredCascade, Tier
from pdserve.settings.external import ExternalEndpoint
from pdserve.shared.errors import ConfigError


@runtime_checkable
class Hook(Protocol):
    """A rule of somebody else's, by entry point."""

    def escalates(self, prompt: str, answer: str) -> bool:
        """Return whether the next tier is to be asked, since a whole answer is not good enough.

        It runs on the event loop, so it takes well below a millisecond, and gives the same answer
        whenever it is asked.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Cascade:
    """One cascade that clients may ask for; each call is planned for a tier, as for that alone."""

    names: tuple[str, ...]  # by which clients call it; the first is its own
    created: int  # seconds since 1970
    tiers: tuple[Tier, ...]  # of which only the last never escalates
    needs_whole_answer: bool  # before it shows any, unless the last tier is asked
    tenants: frozenset[str] = frozenset()  # who may use it; empty: everybody
    hooks: Mapping[str, Hook] = field(default_factory=dict)  # of tiers' rules, by name
    endpoints: Mapping[str, Endpoint] = field(default_factory=dict)  # that are tiers, by name

    @property
    def name(self) -> str:
        """Its own name."""
        return self.names[0]


def make_cascades(
    registered: Mapping[str, RegisteredCascade],
    external: Mapping[str, ExternalEndpoint] = MappingProxyType({}),
) -> list[Cascade]:
    """Return those of a models file.

    Raises ConfigError: a hook is not installed, or fails; or an endpoint's key cannot be read.
    """
    endpoints = {name: _endpoint(name, one) for name, one in external.items()}
    return [
        Cascade(
            names=(name, *one.aliases),
            created=int(time.time()),
            tiers=tuple(one.tiers),
            needs_whole_answer=one.needs_whole_answer,
            tenants=frozenset(one.tenants),
            hooks={rule: _hook(name, rule) for rule in one.hooks},
            endpoints={t.external: endpoints[t.external] for t in one.tiers if t.external},
        )
        for name, one in registered.items()
    ]


def _endpoint(name: str, described: ExternalEndpoint) -> Endpoint:
    try:
        described.key()
    except ConfigError as error:
        raise ConfigError(f"external.{name}: {error}") from error
    return Endpoint(name, described)


def _hook(cascade: str, name: str) -> Hook:
    try:
        return ESCALATIONS.make(Hook, name)  # type: ignore[type-abstract]
    except ValueError as error:
        raise ConfigError(f"cascades.{cascade}: {error}") from error
