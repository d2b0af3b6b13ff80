"""Nodes that are slow, and event loops that are late."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from pdserve.findings.finding import Finding, ok, warning
from pdserve.protocol.status import ClusterStatus, NodeStatus

_NODES, _LOOPS = "speed", "event-loops"
_SLOW_RATIO = 1.5  # actual / profiled
_SLOW_PEER = 2.0  # profiled / that of the fastest node of its pool
_LATE_MS = 500.0  # as in the alert


def speed_findings(status: ClusterStatus) -> list[Finding]:
    """Nodes that are slower than they were, or than others."""
    decode = [node for node in status.nodes if node.role == "decode"]
    prefill = [node for node in status.nodes if node.role == "prefill"]
    found = [
        *(finding for node in status.nodes for finding in _slower_than_profiled(node)),
        *_slower_than_peers(prefill, "a prompt", lambda node: node.profiled_prompt_ms),
        *_slower_than_peers(decode, "a step", lambda node: node.profiled_step_ms),
    ]
    return found or [ok(_NODES, "every node is as fast as it measured itself, and as its pool")]


def loop_findings(status: ClusterStatus) -> list[Finding]:
    """Event loops that were late in the last minute: so late were tokens and heartbeats."""
    lags = {node.node_id: node.event_loop_lag_ms for node in status.nodes}
    lags["the coordinator"] = status.coordinator.event_loop_lag_ms
    found = [_late(name, lag_ms) for name, lag_ms in lags.items() if lag_ms > _LATE_MS]
    return found or [ok(_LOOPS, f"none was late by more than {max(lags.values()):.0f} ms")]


def _slower_than_profiled(node: NodeStatus) -> Iterator[Finding]:
    """A few steps now and then tell nothing: only of a node that is at work."""
    ratio = max(node.prefill_ratio, node.decode_ratio)
    if ratio > _SLOW_RATIO and (node.running_requests or node.queued_tokens):
        yield warning(
            _NODES,
            f"steps of {node.node_id} take {ratio:.1f} times as long as it measured at its start",
            "look what else runs on its machine or GPU, and at its temperature and frequency",
        )


def _slower_than_peers(
    pool: Iterable[NodeStatus], what: str, time_ms: Callable[[NodeStatus], float]
) -> Iterator[Finding]:
    measured = {node.node_id: time_ms(node) for node in pool if time_ms(node)}
    fastest_ms = min(measured.values(), default=0.0)
    for node_id, node_ms in measured.items():
        if node_ms > _SLOW_PEER * fastest_ms:
            yield warning(
                _NODES,
                f"{node_id} took {node_ms:.3g} ms for {what} as it started, the fastest of its "
                f"pool {fastest_ms:.3g} ms",
                "compare their machines and threads; if they are alike, it measured itself beside "
                "something else: remove its profile in ~/.cache/pdserve and restart it",
            )


def _late(name: str, lag_ms: float) -> Finding:
    return warning(
        _LOOPS,
        f"the event loop of {name} was late by {lag_ms / 1e3:.1f} s in the last minute",
        "give the process a core of its own, or fewer engine.threads; its log has the stack that "
        "held it up, unless it was suspended",
    )
