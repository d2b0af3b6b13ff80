"""The router: decides which nodes a request runs on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from msgspec import structs

from coordinator.generation import GenerationRequest, Needs
from coordinator.nodes.registry import Member, Registry
from coordinator.prefixes.index import PrefixIndex, PromptHashes
from coordinator.routing.candidates import Candidates, Job, SidesPolicy
from coordinator.routing.capacity import Ways
from coordinator.routing.fleet import ANY, Fleet
from coordinator.routing.flowing import Flowing, choose_start
from coordinator.routing.loads.books import Booking, Books
from coordinator.routing.loads.slots import Floats, Ints
from coordinator.routing.outlook import HandedOff, OneNode, Outlook, SideBySide, Times
from coordinator.routing.pairs.health import PairHealth
from coordinator.routing.pairs.reach import Pairs
from coordinator.routing.placement import Placement, tpot_within_s
from coordinator.routing.policies import make_policy
from coordinator.routing.sides import OnOneNode, choose, score
from pdserve._native import least
from pdserve.measured.output_lengths import OutputLengths, kind_of
from pdserve.protocol import NodeRole, PrefixSource, Slo
from pdserve.settings.config import Mode
from pdserve.shared.clock import Clock, SystemClock
from pdserve.shared.errors import NoNodeAvailable

FEW = 8  # the most promising nodes, which are evaluated in full
FAR_S = 1e6  # added to the cost of all other nodes


@dataclass(frozen=True, slots=True)
class NodeOutlook:
    """What the router predicts for a node, for people to read."""

    queue_s: float  # prefill queued before a prompt sent there now
    tpot_s: float  # with one more stream in the current batch, of steps of one token each
    pace_share: float  # of such a time, what a token takes; less than 1 where drafts are right


class Router:
    """Places requests by one policy, and keeps the books that its decisions are based on."""

    def __init__(
        self,
        registry: Registry,
        mode: Mode,
        policy: str = "predicted",
        clock: Clock | None = None,
    ) -> None:
        self.mode = mode
        self.prefixes = PrefixIndex()
        self._registry = registry
        self._clock = clock or SystemClock()
        self.fleet = Fleet(registry)
        self.health = PairHealth(registry, self._clock)
        self.pairs = Pairs(registry, self.fleet, self.health, self._clock)
        self._books = Books(registry, self.fleet, self._clock)
        self._policy = chosen = make_policy(policy)
        self._choose = chosen.choose if isinstance(chosen, SidesPolicy) else choose
        self._ways = Ways(self.fleet, self._books.means) if self._choose is choose else None
        self.flowing = Flowing(self.fleet, self._books, self._clock) if mode == "flowing" else None
        registry.on_lost(self.prefixes.remove)

    @property
    def any_node_decodes(self) -> bool:
        """Whether nodes of either pool may have streams."""
        return self.mode in ("adaptive", "flowing")

    # ---- placing -------------------------------------------------------------------------------

    def can_route(self, revision: str = "", adapter: str = "") -> bool:
        """Return whether there are ready nodes in all pools that the mode needs.

        Of a revision, and with an adapter, if they are given.
        """
        needs = Needs(revision, adapter)
        match self.mode:
            case "disaggregated":
                return len(self.fleet.serving(self.pairs.prefills_to_try(adapter), needs)) > 0
            case "colocated" | "multiplexed":
                return len(self.fleet.ready(NodeRole.DECODE, needs)) > 0
            case "adaptive" | "flowing":
                return len(self.fleet.ready(None, needs)) > 0

    def place(self, request: GenerationRequest) -> Placement:
        """Choose nodes for a request; one that wants a single token needs no decode node.

        Raises:
            NoNodeAvailable: a pool that is needed has no ready node, or KV cannot move from one
                to the other; says which.
        """
        return self.place_hashed(request, PromptHashes(request.context))

    def place_hashed(self, request: GenerationRequest, prompt: PromptHashes) -> Placement:
        """Do the same as `place`, with block hashes of the prompt that may be computed already."""
        if request.revision and not self.can_route(*request.needs):
            request = structs.replace(request, revision="")
        if len(self.fleet.ready(None)) == 0:
            raise NoNodeAvailable("no node is ready: try again shortly")
        outlook = self._outlook(request, prompt)
        if self.mode == "multiplexed":
            return self._side_by_side(outlook, self._slots(NodeRole.DECODE, request.needs))
        if request.output_token_ids:  # it goes on where it will decode: there is no token 1 to win
            if self._is_by_role(request.needs) and len(self._handing_off(outlook)):
                return self._pair(outlook)  # but its prompt is not for that node's weights
            return self._local(outlook, self._slots(self._decode_role, request.needs))
        match self.mode:
            case "colocated":
                return self._local(outlook, self._slots(NodeRole.DECODE, request.needs))
            case "disaggregated":
                return self._pair(outlook)
            case "adaptive":
                return self._adaptive(outlook)
            case "flowing":
                assert self.flowing is not None
                return self._flow(outlook, self.flowing)

    def place_elsewhere(self, request: GenerationRequest, prompt: PromptHashes) -> Placement | None:
        """Choose the node that a running stream could move to; None if none has a place for it."""
        slots = self.fleet.ready(self._decode_role, request.needs)
        if len(slots) == 0:
            return None
        outlook = self._outlook(request, prompt)
        near = OneNode(outlook, least(outlook.rough_cost, slots, FEW))
        best = self._on_one_node(outlook, slots, near)
        return best.placement if best.has_place else None

    def place_on(
        self, request: GenerationRequest, prompt: PromptHashes, member: Member
    ) -> Placement:
        """Place all of a request on one node, which has to be a member."""
        return self._local(self._outlook(request, prompt), np.array([member.slot]))

    def place_sibling(self, request: GenerationRequest, first: Placement) -> Placement:
        """Choose a decode node for another answer to a prompt; `first` has the prefill.

        Raises:
            NoNodeAvailable: no decode node that can pull from that prefill node is ready.
        """
        assert first.prefill is not None
        now_s = self._clock.now()
        outlook = Outlook(self.fleet, self._books, request, first.hits, first.kind, now_s)
        computed_s = first.ttft_s - first.held_s  # without the first one's hold
        placement = self._behind(outlook, first.prefill.slot, computed_s, outlook.queue_s)
        return structs.replace(placement, uncached_tokens=0, shares_prefill=True)

    def dispatched(
        self, request: GenerationRequest, placement: Placement, slo: Slo | None = None
    ) -> Booking:
        """Enter a dispatched request into the books; report its progress to the booking.

        `slo`: what its nodes are told of its promise, if not all of it.
        """
        if placement.prefill is not None and placement.decode is not None:
            self.health.sent(placement.prefill, placement.decode)
        return self._books.dispatched(request, placement, slo or request.slo)

    def prefix_sources(self, placement: Placement, puller: Member) -> list[PrefixSource]:
        """Return the nodes that hold more of the prompt than `puller`, which will prefill it."""
        return self.prefixes.prefix_sources(placement.hits, puller)

    # ---- predictions ---------------------------------------------------------------------------

    def tpot_within_s(self, placement: Placement, tpot_s: float) -> float | None:
        """Return the seconds until a node is predicted to keep this TPOT for such a request.

        Where all requests are handed off, only nodes count that can pull from the placement's
        prefill node. None if that is not within the forecast's horizon.
        """
        slots = self._decodes_for(placement)
        now_s = self._clock.now()
        return tpot_within_s(self.fleet, self._books.decodes, slots, placement, tpot_s, now_s)

    def node_outlook(self, member: Member) -> NodeOutlook:
        """Return the current predictions for a member."""
        now_s, slot = self._clock.now(), member.slot
        batch = self._books.decodes.at(now_s, now_s)
        requests, context = int(batch.requests[slot]), int(batch.context[slot])
        queue_s = self._books.queues.all_s(now_s)
        tpot_s = self.fleet.decode_one_s(slot, requests + 1, context)
        return NodeOutlook(float(queue_s[slot]), tpot_s, self._books.pace_share(slot))

    @property
    def lengths(self) -> OutputLengths:
        """What is known of how long answers get."""
        return self._books.lengths

    # ---- parts ---------------------------------------------------------------------------------

    def _outlook(self, request: GenerationRequest, prompt: PromptHashes) -> Outlook:
        hits = self.prefixes.lookup(prompt)
        slo, own = request.slo, request.prompt
        kind = kind_of((slo.name, slo.tenant, own.adapter), own.num_tokens, prompt.beginnings)
        return Outlook(self.fleet, self._books, request, hits, kind, self._clock.now())

    @property
    def _decode_role(self) -> NodeRole | None:
        """The pool whose nodes streams move to; None for any."""
        anywhere = self.any_node_decodes
        if self.flowing is not None:
            anywhere = len(self.fleet.ready(NodeRole.DECODE)) == 0
        return None if anywhere else NodeRole.DECODE

    def _is_by_role(self, needs: Needs) -> bool:
        """Whether decode nodes have other weights than prefill nodes."""
        slots = self.fleet.ready(NodeRole.DECODE, needs)
        members = (self.fleet.members[slot] for slot in slots)
        return any(member is not None and member.hello.arithmetic for member in members)

    def _pair(self, outlook: Outlook) -> Placement:
        prefills = self._handing_off(outlook)
        if not (outlook.ends_with_token_1 or len(prefills)):
            adapter = outlook.request.prompt.adapter
            decodes = self.fleet.ready(NodeRole.DECODE, outlook.request.needs)
            if len(decodes) and len(self.pairs.prefills_to_try(adapter)):  # but all fail now
                return self._local(outlook, decodes)
        costs = outlook.ttft_s, outlook.ttft_s, outlook.queue_s
        return self._handed_off(outlook, self._prefills(outlook, prefills), *costs)

    def _local(self, outlook: Outlook, slots: Ints) -> Placement:
        near = OneNode(outlook, least(outlook.rough_cost, slots, FEW))
        return self._on_one_node(outlook, slots, near).placement

    def _side_by_side(self, outlook: Outlook, slots: Ints) -> Placement:
        sides = SideBySide(outlook, slots)
        legs = self._books.decodes.legs_with_others()
        slot = self._pick("local", outlook, slots, sides.cost, legs)
        idle_tpot_s = 0.0 if outlook.ends_with_token_1 else outlook.alone_s(slot)
        return self._placement(outlook, None, slot, sides.times(slot), idle_tpot_s)

    def _adaptive(self, outlook: Outlook) -> Placement:
        """Choose between one node of either pool and a handoff as in disaggregated mode."""
        needs = outlook.request.needs
        anywhere = self._slots(None, needs)
        prefills, decodes = self._handing_off(outlook), self.fleet.ready(NodeRole.DECODE, needs)
        if len(prefills) == 0 or len(decodes) == 0:  # there is no pair
            return self._local(outlook, anywhere)
        way = self._ways and self._ways.better(prefills, decodes, anywhere)
        if way == "together":
            return self._local(outlook, anywhere)
        looked_at = {
            *least(outlook.rough_cost, decodes, FEW),
            *least(outlook.ttft_s, prefills, FEW),
            *least(outlook.pace_now_s, decodes, FEW),
        }
        near = OneNode(outlook, sorted(looked_at))
        # Prefill nodes may have decode streams, and decode nodes may have prompts.
        ttft_s, begins_s = outlook.ttft_s.copy(), outlook.queue_s.copy()
        ttft_s[near.slots], begins_s[near.slots] = near.ttft_s, near.begins_s
        cost_s = outlook.ttft_s + FAR_S
        cost_s[near.slots] = near.ttft_s
        prefills = self._prefills(outlook, prefills)
        pair = self._handed_off(outlook, prefills, cost_s, ttft_s, begins_s)
        if way == "apart":
            return pair
        # A stream on a prefill node would slow the prompts to come.
        return self._choose(outlook.request.slo, pair, self._on_one_node(outlook, decodes, near))

    def _flow(self, outlook: Outlook, flowing: Flowing) -> Placement:
        """Choose between a prefill node and a decode node to begin on."""
        needs = outlook.request.needs
        prefills = self.fleet.ready(NodeRole.PREFILL, needs)
        decodes = self.fleet.ready(NodeRole.DECODE, needs)
        if len(prefills) == 0 or len(decodes) == 0:
            return self._local(outlook, self._slots(None, needs))
        near = OneNode(outlook, least(outlook.rough_cost, decodes, FEW))
        here = self._on_one_node(outlook, decodes, near)
        tokens = self._books.queues.tokens_with_others()
        slot = self._pick("prefill", outlook, prefills, outlook.ttft_s, tokens)
        if len(self._handing_off(outlook)) and not flowing.could_stay(outlook, slot):
            return choose_start(outlook.request.slo, self._pair(outlook), here)
        times, idle_tpot_s = flowing.times(outlook, slot), outlook.alone_s(slot)
        there = self._placement(outlook, None, slot, times, idle_tpot_s * (times.tpot_s > 0))
        return choose_start(outlook.request.slo, there, here)

    def _handed_off(
        self, outlook: Outlook, prefills: Ints, cost_s: Floats, ttft_s: Floats, begins_s: Floats
    ) -> Placement:
        """Place the prefill on the node that the policy picks by `cost_s`, then the decode leg."""
        tokens = self._books.queues.tokens_with_others()
        prefill = self._pick("prefill", outlook, prefills, cost_s, tokens)
        return self._behind(outlook, prefill, float(ttft_s[prefill]), begins_s)

    def _behind(
        self, outlook: Outlook, prefill: int, first_s: float, begins_s: Floats
    ) -> Placement:
        """Choose the decode node, given that `prefill` computes token 1 in `first_s`."""
        if outlook.ends_with_token_1:
            return self._placement(outlook, prefill, None, Times(first_s, 0.0), 0.0)
        slots = self.pairs.decodes(
            prefill,
            tries=not outlook.request.was_interrupted,
            adapter=outlook.request.prompt.adapter,
        )
        legs = self._books.decodes.legs_with_others()
        if len(slots) == 0:  # the prefill of another answer is there already
            raise NoNodeAvailable("no decode node that can pull its KV is ready: try again shortly")
        then = HandedOff(outlook, prefill, first_s, begins_s)
        decode = self._pick("decode", outlook, slots, then.tpot_s, legs)
        times, idle_tpot_s = then.times(decode), then.idle_tpot_s(decode)
        return self._placement(outlook, prefill, decode, times, idle_tpot_s)

    def _on_one_node(self, outlook: Outlook, slots: Ints, near: OneNode) -> OnOneNode:
        """Choose one node for all of the request.

        `near` holds the most promising nodes, which were evaluated in full.
        """
        legs = self._books.decodes.legs_with_others()
        cost = outlook.rough_cost + FAR_S
        cost[near.slots] = near.harm + score(outlook.request.slo, near.ttft_or_full_s, near.tpot_s)
        slot = self._pick("local", outlook, slots, cost, legs)
        index = near.index(slot)
        if index is None:  # a policy that does not go by cost picked another node
            near, index = OneNode(outlook, [slot]), 0
        times, idle_tpot_s = near.times(index), outlook.alone_s(slot)
        if outlook.ends_with_token_1:
            times, idle_tpot_s = Times(times.ttft_s, 0.0), 0.0
        placement = self._placement(outlook, None, slot, times, idle_tpot_s)
        has_place = near.has_place(index) and not self._books.is_overloaded(slot)
        return OnOneNode(placement, float(near.harm[index]), has_place)

    def _pick(self, job: Job, outlook: Outlook, slots: Ints, cost: Floats, load: Ints) -> int:
        """Have the policy pick a slot for a job."""
        about = outlook.request, slots, cost, load, self.fleet.members, outlook.hits
        return self._policy.pick(Candidates(job, *about))

    def _decodes_for(self, placement: Placement) -> Ints:
        """Return the ready nodes that a request could decode on, if it were placed like this."""
        if self.mode != "adaptive" and placement.prefill is not None:
            return self.pairs.decodes(placement.prefill.slot, adapter=placement.adapter)
        needs = Needs(placement.revision, placement.adapter)
        return self.fleet.ready(self._decode_role, needs)

    def _handing_off(self, outlook: Outlook) -> Ints:
        """Return the prefill nodes of its needs from which handoffs work, or one may try."""
        request = outlook.request
        needs = request.needs
        prefills = self.pairs.prefills(tries=not request.was_interrupted, adapter=needs.adapter)
        return prefills if needs == ANY else self.fleet.serving(prefills, needs)

    def _prefills(self, outlook: Outlook, prefills: Ints) -> Ints:
        """Return the prefill nodes that the request may go to; those are `_handing_off`."""
        needs = outlook.request.needs
        if outlook.ends_with_token_1:
            return self._slots(NodeRole.PREFILL, needs)
        if len(prefills) == 0:  # and none of a decode node that could serve it alone
            prefills = self.fleet.serving(self.pairs.prefills_to_try(needs.adapter), needs)
        if len(prefills) == 0:
            for role in NodeRole:
                self._slots(role, Needs(adapter=needs.adapter))
            raise self.pairs.obstacle()
        return prefills

    def _slots(self, role: NodeRole | None, needs: Needs = ANY) -> Ints:
        """Return the ready nodes of a pool, or of both."""
        slots = self.fleet.ready(role, needs)
        if len(slots) == 0:
            attached = sum(1 for m in self._registry if role is None or m.role is role)
            name = f"{role.name.lower()} node" if role else "node"
            if needs.adapter and len(self.fleet.ready(role)):
                raise NoNodeAvailable(f"no {name} has loaded the adapter yet: try again shortly")
            raise NoNodeAvailable(f"no {name} is ready ({attached} attached): try again shortly")
        return slots

    def _placement(
        self,
        outlook: Outlook,
        prefill: int | None,
        decode: int | None,
        times: Times,
        idle_tpot_s: float,
    ) -> Placement:
        fleet = self.fleet
        prefills = prefill if prefill is not None else decode
        assert prefills is not None
        is_known = float(fleet.is_profiled[prefills])
        if decode is not None:
            is_known *= float(fleet.is_profiled[decode])
        return Placement(
            prefill=fleet.members[prefill] if prefill is not None else None,
            decode=fleet.members[decode] if decode is not None else None,
            ttft_s=is_known * times.ttft_s,
            tpot_s=is_known * times.tpot_s,
            wait_s=is_known * times.wait_s,
            held_s=is_known * times.held_s,
            idle_ttft_s=is_known * float(outlook.prompt_s[prefills]),
            idle_tpot_s=is_known * idle_tpot_s,
            prompt_tokens=outlook.num_tokens,
            uncached_tokens=outlook.num_tokens - outlook.held(prefills),
            output_tokens=outlook.output_tokens,
            hits=outlook.hits,
            kind=outlook.kind,
            usual_tokens=outlook.usual_tokens,
            adapter=outlook.request.prompt.adapter,
        )
