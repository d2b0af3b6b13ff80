"""Adapters: whether requests for them can be served, and which nodes lack them."""

from __future__ import annotations

from pdserve.findings.finding import Finding, names, ok, problem, warning
from pdserve.protocol.status import AdapterStatus, ClusterStatus

_ADAPTERS = "adapters"
_LISTED = 3  # adapters named in one sentence


def adapter_findings(status: ClusterStatus) -> list[Finding]:
    """Whether each can be served; one that no node needs to have now is loaded on demand."""
    adapters = status.coordinator.adapters
    found = [finding for adapter in adapters for finding in _findings_of(adapter)]
    served = [adapter.name for adapter in adapters if adapter.nodes]
    if served:
        listed = names(served[:_LISTED]) + (" and others" if len(served) > _LISTED else "")
        found.append(ok(_ADAPTERS, f"{len(served)} of {len(adapters)} are on nodes: {listed}"))
    return found


def _findings_of(adapter: AdapterStatus) -> list[Finding]:
    if not adapter.digest:
        why = "; ".join(adapter.refusals.values()) or "it is being loaded, or no pair is ready"
        advice = "see that its folder is on every node, and holds an adapter of this model"
        return [
            problem(_ADAPTERS, f"{adapter.name}, of the settings, is not served: {why}", advice)
        ]
    advice = "copy the folder that was loaded to that node, or load what is there in place"
    return [
        warning(_ADAPTERS, f"{node_id} is without {adapter.name}: {why}", advice)
        for node_id, why in adapter.refusals.items()
    ]
