"""Whether certificates end soon."""

from __future__ import annotations

from collections.abc import Mapping

from pdserve.findings.finding import Finding, ok, problem, warning
from pdserve.protocol.status import ClusterStatus

_CHECK = "certificates"
_DAY_S = 86_400.0
_SOON_DAYS = 14
_AT_ONCE_DAYS = 2
_ADVICE = "renew it (pdserve certs, or what made it) where it is: it is read anew without a restart"


def certificate_findings(status: ClusterStatus, now: float) -> list[Finding]:
    """Certificates between processes that have ended, or will soon; `now` is since 1970."""
    if not status.coordinator.has_tls:
        return [ok(_CHECK, "none are in use between processes")]
    ends = {node.node_id: node.certificate_ends_at for node in status.nodes}
    ends["the coordinator"] = status.coordinator.certificate_ends_at
    found = [_found(name, (at - now) / _DAY_S if at else None) for name, at in ends.items()]
    bad = [finding for finding in found if finding is not None]
    return bad or [
        ok(_CHECK, f"all last for {(min(ends.values()) - now) / _DAY_S:.0f} days or more")
    ]


def https_findings(ends: Mapping[str, float], now: float) -> list[Finding]:
    """Certificates that clients are shown and that end soon, by the URL of their coordinator."""
    found = [_found(f"HTTPS at {url}", (at - now) / _DAY_S) for url, at in ends.items()]
    return [finding for finding in found if finding is not None]


def _found(name: str, days: float | None) -> Finding | None:
    whose = f"the certificate of {name}"
    if days is None:
        what = f"when {whose} ends is not known"
        return warning(_CHECK, what, "its log says why; or it is older than this pdserve")
    if days <= 0:
        return problem(
            _CHECK, f"{whose} ended {-days:.1f} days ago: it cannot attach anew", _ADVICE
        )
    if days < _SOON_DAYS:
        level = problem if days < _AT_ONCE_DAYS else warning
        return level(_CHECK, f"{whose} ends in {days:.1f} days", _ADVICE)
    return None
