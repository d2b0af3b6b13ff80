"""Whether clocks agree. Requests do not depend on it; logs, traces and certificates do."""

from __future__ import annotations

from statistics import median

from pdserve.findings.finding import Finding, ok, problem, warning
from pdserve.protocol.status import ClusterStatus

_CHECK = "clocks"
_SKEWED_MS = 1_000.0
_LONG_MS = 300_000.0  # as `pdserve certs` dates certificates back
_ADVICE = "set its clock by NTP (chronyc tracking): until then its log does not fit those of others"
_CERTIFICATES = ", and it takes valid certificates for ones of the future or the past"


def clock_findings(status: ClusterStatus) -> list[Finding]:
    """Nodes whose clocks differ from the coordinator's, or the coordinator's from all others."""
    told = {n.node_id: n.clock_offset_ms for n in status.nodes if n.clock_offset_ms is not None}
    if not told:
        return [ok(_CHECK, "no node tells the time")]
    common_ms = median(told.values())
    if len(told) < 2 or abs(common_ms) <= _SKEWED_MS:
        common_ms = 0.0
    offsets = {name: offset_ms - common_ms for name, offset_ms in told.items()}
    offsets["the coordinator"] = -common_ms
    found = [_skewed(name, ms) for name, ms in offsets.items() if abs(ms) > _SKEWED_MS]
    worst_ms = max(abs(offset_ms) for offset_ms in offsets.values())
    return found or [ok(_CHECK, f"all are within {worst_ms:.0f} ms of the coordinator's")]


def _skewed(name: str, offset_ms: float) -> Finding:
    way = "ahead of" if offset_ms > 0 else "behind"
    whose = "most nodes'" if name == "the coordinator" else "the coordinator's"
    what = f"the clock of {name} is {abs(offset_ms) / 1e3:.1f} s {way} {whose}"
    if abs(offset_ms) > _LONG_MS:
        return problem(_CHECK, what, _ADVICE + _CERTIFICATES)
    return warning(_CHECK, what, _ADVICE)
