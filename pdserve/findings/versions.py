"""Whether all processes run the same program, and the revisions that they should."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from pdserve.findings.finding import Finding, names, ok, warning
from pdserve.protocol.status import ClusterStatus

_CHECK = "versions"
_COORDINATOR = "the coordinator"


def version_findings(status: ClusterStatus) -> list[Finding]:
    """Versions of the program, and revisions of the model."""
    programs = _by(
        {_COORDINATOR: status.coordinator.program_version}
        | {node.node_id: node.program_version for node in status.nodes}
    )
    revisions = _by({node.node_id: node.revision for node in status.nodes})
    found = [*_programs(programs), *_revisions(revisions, status.coordinator.revision_shares)]
    return found or [
        ok(
            _CHECK,
            f"pdserve {names(programs)}; {len(revisions)} revision"
            f"{'s, each with a share' if len(revisions) > 1 else ''}",
        )
    ]


def _by(values: Mapping[str, str]) -> dict[str, list[str]]:
    """Who has which value."""
    owners: dict[str, list[str]] = defaultdict(list)
    for name, value in values.items():
        owners[value].append(name)
    return owners


def _programs(programs: Mapping[str, list[str]]) -> Iterator[Finding]:
    if len(programs) > 1:
        yield warning(
            _CHECK,
            "several versions of pdserve run side by side: " + _told(programs, "an older one"),
            "end the rollout: restart those that were left out, one at a time",
        )


def _revisions(
    revisions: Mapping[str, list[str]], shares: Mapping[str, float]
) -> Iterator[Finding]:
    for prefix in shares:
        if not any(revision.startswith(prefix) for revision in revisions):
            yield warning(
                _CHECK,
                f"revision {prefix} has a share, but no node",
                "start its nodes, or give all to the others: pdserve revisions REVISION=1",
            )
    unshared = [r for r in revisions if not any(r.startswith(prefix) for prefix in shares)]
    if unshared and len(revisions) > 1:
        yield warning(
            _CHECK,
            f"revisions are side by side without a share for each: {_told(revisions)}"
            f"{_same_weights(revisions)}",
            "KV never moves between them: give each a share (pdserve revisions), or stop the nodes "
            "of one",
        )


def _same_weights(revisions: Mapping[str, list[str]]) -> str:
    """What a revision begins with is its checkpoint (`pdserve/node/start/model.py`)."""
    if len({revision.partition("+")[0] for revision in revisions}) > 1:
        return ""
    return "; the checkpoint is the same, but not the quantization or the kernels (engine.kernels)"


def _told(owners: Mapping[str, list[str]], unnamed: str = "unknown") -> str:
    return "; ".join(f"{value or unnamed} ({names(who)})" for value, who in owners.items())
