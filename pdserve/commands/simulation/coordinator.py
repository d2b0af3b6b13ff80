"""The front under test: the real router and admission, over simulated nodes.

Does the same as `coordinator/requests/flow.py`, without the handling of failures. Nodes report as
real ones do: KV events at once, their load at every heartbeat.
"""

from __future__ import annotations

from math import inf

from coordinator.admission import Admission, Admit, Refuse, Wait, WaitingLine
from coordinator.generation import GenerationRequest
from coordinator.nodes.registry import Member, Registry
from coordinator.routing import Booking, Placement, Router
from coordinator.routing.flowing import flows_from
from coordinator.routing.loads.decode import BUCKET_S
from pdserve.commands.simulation.call import Call
from pdserve.commands.simulation.cluster import Cluster, left_of
from pdserve.commands.simulation.moves import Moves
from pdserve.commands.simulation.node import Node
from pdserve.commands.simulation.prompts import hashes_of
from pdserve.node.reports.kv_events import TierEvents
from pdserve.protocol import (
    KvTier,
    LoadReport,
    NodeHello,
    NodeState,
    PerfReport,
    SamplingParams,
    Slo,
    TransportReach,
)
from pdserve.settings.config import Mode
from pdserve.settings.timeouts import Timeouts
from pdserve.wire.outbox import Outbox

HEARTBEAT_S = Timeouts().heartbeat_s
MAX_WAITING = 1024


class Coordinator:
    """Implements Front with the real router and admission."""

    def __init__(
        self,
        cluster: Cluster,
        mode: Mode,
        router: str = "predicted",
        *,
        admission: bool = False,
    ) -> None:
        self._cluster = cluster
        self._events = cluster.events
        self._registry = Registry()
        self.router = Router(self._registry, mode, router, self._events)
        self._line: WaitingLine[Call] = WaitingLine(MAX_WAITING)
        self.admission = Admission(self._line, refuses=admission)
        self._nodes: dict[str, Node] = {node.name: node for node in cluster.nodes}
        self._members: dict[Node, Member] = {node: self._join(node) for node in cluster.nodes}
        self._bookings: dict[str, Booking] = {}
        self.moves = Moves(cluster, self.router, self.admission, self._bookings, self._request)
        self._held: dict[str, float] = {}  # call id |-> token 1 is held back until then
        self._has_heartbeat = False

    # ---- as Front ------------------------------------------------------------------------------

    def arrive(self, call: Call) -> None:
        """Place a call; then dispatch it, queue it, or refuse it."""
        if not self._has_heartbeat:
            self._has_heartbeat = True
            self._heartbeat()
        request, now_s = self._request(call), self._events.now_s
        placement = self._place(call, request)

        def within_s(tpot_s: float) -> float | None:
            return self.router.tpot_within_s(placement, tpot_s)

        decision = self.admission.decide(call.slo, placement, now_s, within_s)
        match decision:
            case Admit(slo):
                self._dispatch(call, request, placement, slo)
            case Refuse():
                self._cluster.refuse(call)
            case Wait():
                self.admission.wait(call.call_id, call, call.slo, now_s, decision)

    def progressed(self, call: Call, num_tokens: int) -> None:
        """As Front.progressed."""
        booking, now_s = self._bookings[call.call_id], self._events.now_s
        booking.progressed(num_tokens)
        if num_tokens == 1:
            self._prefilled(call, booking, now_s)
        elif num_tokens == 2:
            if call.call_id in self._held:
                shown_s = min(now_s, self._held.pop(call.call_id))
                self._cluster.show(call, shown_s)
                self.admission.first_token(call.call_id, shown_s)
            self.moves.look()

    def silent_until_s(self, call: Call, num_tokens: int) -> float:
        """As Front.silent_until_s. A booking is planned anew when its plan is over."""
        booking = self._bookings[call.call_id]
        plan, may_move = booking.plan, self.router.flowing is not None
        if self._flows(booking.placement) or (may_move and num_tokens < 2):
            return -inf
        if num_tokens < 2:
            return 0.0  # it waits for token 2, which is the end of a handoff
        if plan is None or plan.end is None:
            return inf
        return plan.end * BUCKET_S * (1 - 1e-9)  # not later, whatever the rounding

    def ended(self, call: Call) -> None:
        """As Front.ended."""
        self._bookings.pop(call.call_id).end(by_itself=True)
        self.moves.ended(call)
        self.admission.ended(call.call_id, self._events.now_s, call.num_output)
        self._let_in()

    def _prefilled(self, call: Call, booking: Booking, now_s: float) -> None:
        until_s = call.at_s + call.slo.hold_s
        if call.num_output > 1 and until_s > now_s and booking.has_to_wait:
            self._held[call.call_id] = until_s
        else:
            self.admission.first_token(call.call_id, now_s)
        self._let_in()

    # ---- dispatch ------------------------------------------------------------------------------

    def _dispatch(
        self, call: Call, request: GenerationRequest, placement: Placement, slo: Slo
    ) -> None:
        self._bookings[call.call_id] = self.router.dispatched(request, placement, slo)
        self.admission.dispatched(call.call_id, slo, placement, self._events.now_s)
        self._cluster.dispatch(
            call,
            self._node(placement.prefill),
            self._node(placement.decode),
            slo,
            self._prefix_source(placement),
            flows=self._flows(placement),
            expected_output=round(placement.usual_tokens),
        )
        self.moves.look()

    def _flows(self, placement: Placement) -> bool:
        decode = placement.decode
        return self.router.flowing is not None and decode is not None and flows_from(decode)

    def _prefix_source(self, placement: Placement) -> Node | None:
        prefills = placement.prefill or placement.decode
        assert prefills is not None
        sources = self.router.prefix_sources(placement, prefills)
        return self._nodes[sources[0].node.node_id] if sources else None

    def _let_in(self) -> None:
        """Dispatch waiting calls as far as there is room now."""
        while (call := self._line.head) is not None:
            now_s = self._events.now_s
            request = self._request(call)
            placement = self._place(call, request)
            decision = self.admission.reconsider(left_of(call, now_s), placement, now_s)
            if not isinstance(decision, Admit):
                return
            self._line.leave(call.call_id)
            self._dispatch(call, request, placement, decision.slo)

    def _place(self, call: Call, request: GenerationRequest) -> Placement:
        return self.router.place_hashed(request, hashes_of(call))

    def _request(self, call: Call) -> GenerationRequest:
        return GenerationRequest(
            request_id=call.call_id,
            prompt=call.prompt,
            sampling=SamplingParams(max_tokens=call.max_tokens, ignore_eos=call.is_exact),
            slo=call.slo,
        )

    def _node(self, member: Member | None) -> Node | None:
        return None if member is None else self._nodes[member.node_id]

    # ---- what nodes say ------------------------------------------------------------------------

    def _join(self, node: Node) -> Member:
        hello = NodeHello(
            node_id=node.name,
            incarnation="1",
            role=node.role,
            state=NodeState.READY,
            session_address=f"{node.host.name}:1",
            metrics_address="",
            model_id="",
            revision="",
            layout=node.machine.layout,
            num_blocks=node.machine.num_blocks,
            max_model_len=node.machine.num_kv_tokens,
            transports=[TransportReach(name="tcp")],
            late_last=node.late_last,
        )
        member = self._registry.add(hello, Outbox())  # nodes are called, not written to
        self._registry.report(member, self._load(node))
        report = PerfReport(
            step=node.perf.costs,
            token_budget=node.machine.token_budget,
            max_batch_size=node.machine.max_batch_size,
            transfers=[node.machine.transfer],
        )
        self._registry.profiled(member, report)
        node.pool.observe(self._kv_events(node, member))
        return member

    def _kv_events(self, node: Node, member: Member) -> TierEvents:
        def tell() -> None:
            for message in tier.take_changes():
                self.router.prefixes.apply(member, message)

        def has_changed() -> None:
            self._events.soon(tell)

        tier = TierEvents(KvTier.POOL, lambda: node.pool.hashes, has_changed)
        return tier

    def _heartbeat(self) -> None:
        for node, member in self._members.items():
            self._registry.report(member, self._load(node))
        self._let_in()
        self.moves.look()
        if self._cluster.is_busy:
            self._events.after(HEARTBEAT_S, self._heartbeat)
        else:
            self._has_heartbeat = False

    def _load(self, node: Node) -> LoadReport:
        node.sync()
        prefill_ratio, decode_ratio = node.perf.known_ratios(self._events.now_s)
        queues, num_claims = node.core.queues, self._cluster.num_waiting_for_room(node)
        return LoadReport(
            state=NodeState.READY,
            role=node.role,
            queued_tokens=queues.queued_tokens,
            running_requests=len(queues.running),
            waiting_requests=len(queues.waiting) + num_claims,
            free_blocks=node.pool.num_free,
            cached_blocks=node.pool.num_cached,
            pinned_blocks=node.num_pinned_blocks,
            prefill_ratio=prefill_ratio,
            decode_ratio=decode_ratio,
        )
