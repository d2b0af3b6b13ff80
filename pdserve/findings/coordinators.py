"""Whether the coordinators of the same nodes agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from pdserve.findings.finding import Finding, names, ok, problem, warning
from pdserve.protocol.status import ClusterStatus

_CHECK = "coordinators"
_UNEQUAL: dict[str, Callable[[ClusterStatus], object]] = {
    "models": lambda status: status.model,
    "modes": lambda status: status.mode,
    "versions of pdserve": lambda status: status.coordinator.program_version,
    "shares of the revisions": lambda status: status.coordinator.revision_shares,
}
_ADVICE = {
    "models": "they are of two clusters: ask each about its own",
    "modes": "restart one with the other's mode",
    "versions of pdserve": "end the rollout: restart those that were left out, one at a time",
    "shares of the revisions": "tell each the same: pdserve revisions --url URL REVISION=SHARE ...",
}


def attachment_findings(status: ClusterStatus) -> list[Finding]:
    """Nodes that are not attached to all coordinators, as one of these sees it."""
    found = []
    for node in status.nodes:
        if node.coordinators < status.coordinators:
            what = f"{node.node_id} is attached to {node.coordinators} of {status.coordinators}"
            advice = "look in its log why not to the others, and at its `coordinators`"
            found.append(warning(_CHECK, what, advice))
    leaders = {node.leader for node in status.nodes if node.leader}
    if len(leaders) > 1:
        found.append(
            warning(
                _CHECK,
                "nodes name different leaders, so this coordinator neither moves nodes nor scales",
                "attach every node to the same coordinators",
            )
        )
    return found or [ok(_CHECK, f"every node is attached to {_all(status.coordinators)}")]


def agreement_findings(answers: Mapping[str, ClusterStatus]) -> list[Finding]:
    """What the coordinators at several URLs say differently."""
    found = [*_unequal(answers), *_nodes(answers)]
    num_coordinators = max(status.coordinators for status in answers.values())
    if len(answers) < num_coordinators:
        what = f"{len(answers)} of {num_coordinators} coordinators were asked"
        found.append(ok(_CHECK, what, "name the others too: --cluster URL URL ..."))
    elif not found and len(answers) > 1:
        found.append(ok(_CHECK, f"all {len(answers)} agree"))
    return found


def _unequal(answers: Mapping[str, ClusterStatus]) -> Iterator[Finding]:
    for what, read in _UNEQUAL.items():
        told = {url: read(status) for url, status in answers.items()}
        first = next(iter(told.values()))
        if any(value != first for value in told.values()):
            text = "; ".join(f"{url}: {value or 'none'}" for url, value in told.items())
            yield problem(_CHECK, f"the coordinators have different {what}: {text}", _ADVICE[what])


def _nodes(answers: Mapping[str, ClusterStatus]) -> Iterator[Finding]:
    seen = {url: {node.node_id for node in status.nodes} for url, status in answers.items()}
    everywhere = set[str]().union(*seen.values())
    for url, node_ids in seen.items():
        if missing := everywhere - node_ids:
            yield warning(
                _CHECK,
                f"{url} does not have {names(missing)}, which another coordinator has",
                f"check that {url}'s gRPC port is among their `coordinators`, and reached from "
                "there; their logs say why not",
            )


def _all(number: int) -> str:
    return "the coordinator" if number == 1 else f"all {number} coordinators"
