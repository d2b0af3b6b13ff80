"""A cascade as the API sees it: a name for several models, of which the first are asked first."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from coordinator.external.endpoint import Endpoint
from pdserve.measured.routes import RouteClassifier, read_classifier
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
    classifiers: Mapping[str, RouteClassifier] = field(default_factory=dict)  # of rules, by file
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

    Raises ConfigError: a hook is not installed, or fails; a classifier is not of its tiers, or
    cannot be read; nor can an endpoint's key.
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
            classifiers=dict(_classifiers(name, one.tiers)),
            endpoints={t.external: endpoints[t.external] for t in one.tiers if t.external},
        )
        for name, one in registered.items()
    ]


def _classifiers(cascade: str, tiers: Sequence[Tier]) -> Iterator[tuple[str, RouteClassifier]]:
    """Yield those that its rules ask, by their files. Raises ConfigError."""
    for tier, after in pairwise(tiers):
        if tier.escalate is None or not tier.escalate.classifier:
            continue
        file = tier.escalate.classifier
        try:
            found = read_classifier(Path(file))
        except ConfigError as error:
            raise ConfigError(f"cascades.{cascade}: {error}") from error
        if found.tiers != [tier.name, after.name]:
            raise ConfigError(
                f"cascades.{cascade}: {file} was fitted to the tiers {', '.join(found.tiers)}, and "
                f"these are {tier.name}, {after.name}"
            )
        yield file, found


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
