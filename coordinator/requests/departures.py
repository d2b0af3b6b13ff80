"""What becomes of a node's requests when it is lost, sick, drains or leaves the decode pool."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from coordinator.nodes.registry import Member, Registry
from coordinator.requests.legs import lost
from coordinator.requests.moves import Moves
from coordinator.requests.resumes import Resumes
from coordinator.requests.running import RunningRequest
from coordinator.routing import Router
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import NodeRole, NodeState

log = logging.getLogger(__name__)


class Departures:
    """Sends requests away from nodes that do nothing more for them, or soon will not."""

    def __init__(
        self,
        registry: Registry,
        router: Router,
        by_leg: Mapping[str, RunningRequest],
        resumes: Resumes,
        moves: Moves,
        metrics: CoordinatorMetrics,
    ) -> None:
        self._router = router
        self._by_leg = by_leg
        self._resumes = resumes
        self._moves = moves
        self._metrics = metrics
        registry.on_lost(self._lost)
        registry.on_changed(self._changed)

    def _lost(self, member: Member) -> None:
        has_drained = member.load.state is NodeState.DRAINING
        if not has_drained:
            self._metrics.nodes_lost.labels(role=member.role.name.lower()).inc()
        self._moves.lost(member)
        # Of silence no request is guilty: a host that stands still, or was cut off, is silent, too.
        is_crash = not (has_drained or member.is_silent)
        self._interrupt(member, "node_lost", member.hello.incarnation if is_crash else "")

    def _changed(self, member: Member) -> None:
        if member.load.state is NodeState.SICK:
            self._moves.lost(member)
            self._interrupt(member, "node_sick", member.hello.incarnation)
        self._moves.changed(member, is_wanted=self._is_wanted(member))
        self._resumes.changed(member)

    def _interrupt(self, member: Member, reason: str, failure: str) -> None:
        """Take its requests from a node that does nothing for them any more (`interrupted`)."""
        num_interrupted = 0
        for running in list(self._by_leg.values()):
            dispatch = running.dispatch
            if dispatch is None:
                continue
            needs_prefill = dispatch.prefill is member and not running.has_token_one
            if dispatch.decode is member or needs_prefill:
                num_interrupted += 1
                error = lost(running.has_token_one)
                self._resumes.interrupted(running, error, reason, failure)
            # Otherwise the decode node has all the KV it needs, or will fail its leg itself.
        if failure:
            self._resumes.failed(member)
        if num_interrupted:
            log.warning("%d requests of %s go on elsewhere", num_interrupted, member.node_id)

    def _is_wanted(self, member: Member) -> bool:
        """Whether a node is to go on with its streams."""
        decodes = member.role is NodeRole.DECODE or self._router.any_node_decodes
        return decodes and member.load.state is not NodeState.DRAINING
