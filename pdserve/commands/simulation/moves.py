"""Streams that flow from node to node: as `coordinator/requests/moves.py`, without failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial

from msgspec import structs

from coordinator.admission import Admission
from coordinator.generation import GenerationRequest
from coordinator.nodes.registry import Member
from coordinator.requests.moves import MOST_PER_TARGET
from coordinator.routing import Booking, Router
from pdserve.commands.simulation.call import Call
from pdserve.commands.simulation.cluster import Cluster
from pdserve.commands.simulation.node import Node
from pdserve.commands.simulation.prompts import hashes_of


class Moves:
    """The moves of one coordinator; the router decides who moves, and where to."""

    def __init__(
        self,
        cluster: Cluster,
        router: Router,
        admission: Admission[Call],
        bookings: MutableMapping[str, Booking],
        request_of: Callable[[Call], GenerationRequest],
    ) -> None:
        """
        Args:
            cluster: has the nodes and the calls.
            router: the coordinator's.
            admission: the coordinator's.
            bookings: those of its calls, by call id; the booking of a stream that moves is
                replaced.
            request_of: makes the request of a call.
        """
        self._cluster = cluster
        self._router = router
        self._admission = admission
        self._bookings = bookings
        self._request_of = request_of
        self._nodes: Mapping[str, Node] = {node.name: node for node in cluster.nodes}
        self._targets: dict[str, Member] = {}  # call id |-> where its stream is about to move
        self.num_done = 0

    def look(self) -> None:
        """Begin the moves of streams that would be late where they are."""
        if self._router.flowing is None:
            return
        streams = {booking: call_id for call_id, booking in self._bookings.items()}
        at_target = Counter(self._targets.values())
        for booking in self._router.flowing.at_risk(streams):
            call = self._cluster.call(streams[booking])
            if call.call_id in self._targets or booking.num_tokens < 2:
                continue
            placement = self._router.place_elsewhere(self._rest(call), hashes_of(call))
            target = placement.decode if placement is not None else None
            if target is None or at_target[target] >= MOST_PER_TARGET:
                return
            at_target[target] += 1
            self._targets[call.call_id] = target
            then = partial(self._carry_out, call, target)
            self._cluster.prefetch(call, self._nodes[target.node_id], then)

    def ended(self, call: Call) -> None:
        """Forget a call."""
        self._targets.pop(call.call_id, None)

    def _carry_out(self, call: Call, target: Member) -> None:
        """Its KV is at the target, and the stream has its next token."""
        call_id = call.call_id
        del self._targets[call_id]
        self.num_done += 1
        self._bookings[call_id].end(by_itself=False)
        request = self._rest(call)
        placement = self._router.place_on(request, hashes_of(call), target)
        slo = structs.replace(call.slo, ttft_s=call.slo.tpot_s or call.slo.ttft_s, hold_s=0.0)
        self._bookings[call_id] = self._router.dispatched(request, placement, slo)
        self._admission.interrupted(call_id)
        self._cluster.go_on(call, self._nodes[target.node_id], slo)
        self.look()

    def _rest(self, call: Call) -> GenerationRequest:
        """Return what is left of a call; what its tokens are does not matter."""
        num_tokens = self._bookings[call.call_id].num_tokens
        return structs.replace(self._request_of(call), output_token_ids=[0] * num_tokens)
