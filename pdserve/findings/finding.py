"""One result of `pdserve doctor --cluster`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum

import msgspec

from pdserve.protocol.status import ClusterStatus


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"  # requests are served, but not as well as they could be, or not for long
    PROBLEM = "problem"  # somebody has to do something


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What a check has found."""

    check: str  # which group of checks it is of
    level: Level
    what: str
    advice: str = ""  # what to do; empty: nothing
    coordinator: str = ""  # the URL of the one that tells it; empty: the only one, or all do


Check = Callable[[ClusterStatus], list[Finding]]


def ok(check: str, what: str, advice: str = "") -> Finding:
    """Nothing is wrong."""
    return Finding(check=check, level=Level.OK, what=what, advice=advice)


def warning(check: str, what: str, advice: str) -> Finding:
    """Something is worse than it could be."""
    return Finding(check=check, level=Level.WARNING, what=what, advice=advice)


def problem(check: str, what: str, advice: str) -> Finding:
    """Something is wrong."""
    return Finding(check=check, level=Level.PROBLEM, what=what, advice=advice)


def names(of: Iterable[str]) -> str:
    """Several names in a sentence: "a, b and c"."""
    *most, last = sorted(of)
    return f"{', '.join(most)} and {last}" if most else last
