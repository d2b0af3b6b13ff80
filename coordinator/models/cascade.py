"""A cascade as the API sees it: a name for several models, of which the first are asked first."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.settings.cascades import RegisteredCascade, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Cascade:
    """One cascade that clients may ask for; each call is planned for a tier, as for that alone."""

    names: tuple[str, ...]  # by which clients call it; the first is its own
    created: int  # seconds since 1970
    tiers: tuple[Tier, ...]  # of which only the last never escalates
    needs_whole_answer: bool  # before it shows any, unless the last tier is asked
    tenants: frozenset[str] = frozenset()  # who may use it; empty: everybody

    @property
    def name(self) -> str:
        """Its own name."""
        return self.names[0]


def make_cascades(registered: Mapping[str, RegisteredCascade]) -> list[Cascade]:
    """Return those of a models file."""
    return [
        Cascade(
            names=(name, *one.aliases),
            created=int(time.time()),
            tiers=tuple(one.tiers),
            needs_whole_answer=one.needs_whole_answer,
            tenants=frozenset(one.tenants),
        )
        for name, one in registered.items()
    ]
