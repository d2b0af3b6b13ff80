"""The state of a cluster that serves several models, as one status."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from pdserve.protocol.status import ClusterStatus, ModelStatus, WaitingClass


def whole_status(models: Mapping[str, ClusterStatus]) -> ClusterStatus:
    """Return the status of all models together: of the first of several, with what others add.

    `models`: the status of each, by its name.
    """
    first, *others = models.values()
    if not others:
        return first
    nodes = [replace(node, model=name) for name, status in models.items() for node in status.nodes]
    refused = Counter[str]()
    for status in models.values():
        refused.update(status.refused)
    return replace(
        first,
        model=", ".join(models),
        wake_s=0.0,
        ready=any(status.ready for status in models.values()),
        coordinators=max(status.coordinators for status in models.values()),
        inflight=sum(status.inflight for status in models.values()),
        waiting=sum(status.waiting for status in models.values()),
        waiting_by_class=_by_class(w for s in models.values() for w in s.waiting_by_class),
        refused=dict(refused),
        nodes=sorted(nodes, key=lambda node: node.node_id),
        models=[_of_one(name, status) for name, status in models.items()],
    )


def _of_one(name: str, status: ClusterStatus) -> ModelStatus:
    return ModelStatus(
        name=name,
        ready=status.ready,
        wake_s=status.wake_s,
        inflight=status.inflight,
        waiting=status.waiting,
        refused=status.refused,
        prefixes=status.prefixes,
    )


def _by_class(waiting: Iterable[WaitingClass]) -> list[WaitingClass]:
    """Add up what waits, by class. A tenant may wait for several models, and counts for each."""
    total: dict[str, WaitingClass] = {}
    for one in waiting:
        known = total.get(one.slo_class, WaitingClass(one.slo_class, 0, 0, 0.0))
        total[one.slo_class] = WaitingClass(
            one.slo_class,
            known.requests + one.requests,
            known.tenants + one.tenants,
            max(known.oldest_s, one.oldest_s),
        )
    return list(total.values())
