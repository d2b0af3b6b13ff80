"""All checks of what one coordinator tells."""

from __future__ import annotations

from functools import partial
from typing import Final

from msgspec.structs import replace

from pdserve.findings.adapters import adapter_findings
from pdserve.findings.certificates import certificate_findings
from pdserve.findings.clocks import clock_findings
from pdserve.findings.coordinators import attachment_findings
from pdserve.findings.drafts import draft_findings
from pdserve.findings.finding import Check, Finding, Level, ok
from pdserve.findings.links import pair_findings, transport_findings
from pdserve.findings.load import call_findings, load_findings
from pdserve.findings.nodes import node_findings
from pdserve.findings.pools import pool_findings
from pdserve.findings.speed import loop_findings, speed_findings
from pdserve.findings.versions import version_findings
from pdserve.findings.weights import weight_findings
from pdserve.protocol.status import ClusterStatus, ModelStatus

_OF_MODEL: Final[tuple[Check, ...]] = (
    pool_findings,
    version_findings,
    load_findings,
    speed_findings,
)
_OF_ALL: Final[tuple[Check, ...]] = (
    node_findings,
    pair_findings,
    transport_findings,
    call_findings,
    loop_findings,
    draft_findings,
    adapter_findings,
    weight_findings,
    clock_findings,
    attachment_findings,
)
_WORST_FIRST: Final = (Level.PROBLEM, Level.WARNING, Level.OK)


def findings(status: ClusterStatus, now: float) -> list[Finding]:
    """Check a status; certificates end at a time, so `now` is in seconds since 1970."""
    checks: tuple[Check, ...] = (*_OF_ALL, partial(certificate_findings, now=now))
    return [
        *(found for check in _OF_MODEL for found in _by_model(check, status)),
        *(found for check in checks for found in check(status)),
    ]


def _by_model(check: Check, status: ClusterStatus) -> list[Finding]:
    """Check each of several models by itself, and say which one is meant."""
    if not status.models:
        return check(status)
    told = []
    for model in status.models:
        part = status.of_model(model)
        if part.nodes or not model.ready:
            found = check(part)
        else:  # it sleeps
            found = [_asleep(model)] if check is pool_findings else []
        told += [replace(one, what=f"{model.name}: {one.what}") for one in found]
    return told


def _asleep(model: ModelStatus) -> Finding:
    takes = f", in about {model.wake_s:.2g} s" if model.wake_s else ""
    return ok("pools", f"asleep: a node wakes for the next request{takes}")


def worst_first(found: list[Finding]) -> list[Finding]:
    """Return them with the problems first."""
    return sorted(found, key=lambda finding: _WORST_FIRST.index(finding.level))
