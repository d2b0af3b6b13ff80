"""The books: requests that this coordinator has dispatched and that have not ended.

The books are updated when a request is dispatched, when its tokens arrive, and when it ends. Each
update changes a few array elements; a token of a stream that keeps to its plan costs a comparison.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sized
from math import inf
from typing import Final

from coordinator.generation import GenerationRequest
from coordinator.nodes.registry import Member, Registry
from coordinator.routing.fleet import Fleet
from coordinator.routing.loads.decode import DecodeLoad, Plan
from coordinator.routing.loads.means import RequestMeans
from coordinator.routing.loads.paces import StreamPaces
from coordinator.routing.loads.prefill import PendingPrompt, PrefillQueues, ServiceClass
from coordinator.routing.placement import Newcomer, Placement
from pdserve.measured.output_lengths import OutputLengths, remaining
from pdserve.protocol import Slo
from pdserve.shared.clock import Clock

PATIENCE: Final = 4.0  # in promised TPOTs: after a longer gap, a request waits for a place


class PendingHandoffs:
    """Requests with token 1 but not token 2, by the decode node's slot: token 1 may be held back.

    A handed-off request waits for a place in the batch between tokens 1 and 2. This wait breaks its
    TPOT, although its TTFT may have seconds to spare; and prefill nodes send short prompts that
    have queued behind a long one in a burst. A client gains nothing from a token that no other
    follows. So where a decode node is full, token 1 is shown when the stream continues, as in
    systems where decode nodes send all tokens, but no later than the class allows, which is bounded
    by its TTFT.

    A decode node is full if it makes others wait (`makes_wait`), or if its current batch has no
    place for the request by the batch rule (`pdserve/rules/batch.py`). These predictions alone may
    be wrong; the wait of others alone detects a queue only after the first request in it has missed
    its TPOT.
    """

    def __init__(self) -> None:
        self._begun_s: defaultdict[int, dict[str, float]] = defaultdict(dict)  # oldest first

    def begin(self, slot: int, request_id: str, now_s: float) -> None:
        """Record that token 1 has arrived."""
        self._begun_s[slot][request_id] = now_s

    def end(self, slot: int, request_id: str) -> None:
        """Record that token 2 has arrived or the request has ended. Idempotent."""
        self._begun_s[slot].pop(request_id, None)

    def longest_s(self, slot: int, now_s: float) -> float:
        """Return how long the oldest handoff has waited; 0 if there is none."""
        return now_s - next(iter(self._begun_s[slot].values()), now_s)

    def makes_wait(self, slot: int, tpot_s: float, now_s: float) -> bool:
        """Return whether a node makes handed-off requests wait, by what this TPOT calls long."""
        return 0 < PATIENCE * tpot_s < self.longest_s(slot, now_s)

    def clear(self, slot: int) -> None:
        """Forget the handoffs of a lost node."""
        self._begun_s[slot].clear()


UNKNOWN_TPOT_S = 0.05  # assumed for nodes that have not reported a profile
_PATIENCE = 4.0  # in full steps: after a longer wait, a handed-off request waits for a place


class Booking:
    """One request that has been dispatched."""

    def __init__(self, books: Books, request: GenerationRequest, placement: Placement) -> None:
        self.request = request
        self.placement = placement
        self.output: Sized = ()  # of the request, whether it was told of or not
        self._num_told = len(request.output_token_ids)
        self.plan: Plan | None = None  # entry in the decode node's calendar
        self.is_prefilled = False
        self.first: tuple[float, int] | None = None  # when it had its first tokens there, how many
        self.is_under_way = False  # handoff: token 1 is there, token 2 is not
        self._books = books

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return max(self._num_told, len(self.output))

    @property
    def steady_until_s(self) -> float:
        """Until when further tokens change nothing in the books."""
        return self._books.steady_until_s(self)

    def progressed(self, num_tokens: int) -> None:
        """Record the number of output tokens so far; the first one ends the prefill."""
        self._num_told = max(self._num_told, num_tokens)
        self._books.progressed(self)

    @property
    def has_to_wait(self) -> bool:
        """Whether it was handed off to a decode node that is predicted to have no place for it."""
        return self._books.has_to_wait(self)

    def end(self, *, by_itself: bool) -> None:
        """Remove the request from the books; call once.

        `by_itself`: it finished, and neither failed nor was cancelled.
        """
        self._books.ended(self, by_itself=by_itself)


class Books:
    """All bookings, aggregated into loads by slot."""

    def __init__(self, registry: Registry, fleet: Fleet, clock: Clock) -> None:
        self.queues = PrefillQueues(fleet)
        self.decodes = DecodeLoad(fleet, clock.now())
        self.lengths = OutputLengths()
        self.means = RequestMeans()
        self.handoffs = PendingHandoffs()
        self._paces = StreamPaces()
        self._fleet = fleet
        self._clock = clock
        for member in registry:
            self._reported(member)
        registry.on_changed(self._reported)
        registry.on_lost(self._lost)

    def dispatched(self, request: GenerationRequest, placement: Placement, slo: Slo) -> Booking:
        """Book a request whose legs are being sent."""
        booking = Booking(self, request, placement)
        prefills = placement.prefill or placement.decode
        assert prefills is not None
        now_s = self._clock.now()
        if not placement.shares_prefill:
            self.queues.push(
                prefills,
                request.request_id,
                _pending(slo, placement, now_s),
                now_s,
            )
        decode = placement.decode
        if decode is not None:
            self.decodes.legs[decode.slot] += 1
            self.decodes.shares.add(decode.slot, ServiceClass.of(request.slo), 1)
            if placement.prefill is None:
                self.decodes.activate(decode.slot, 1, _context(placement))
            self._plan(booking, decode, now_s, now_s + placement.ttft_s - placement.held_s)
        self.means.began(booking)
        return booking

    def progressed(self, booking: Booking) -> None:
        """Update the books for new tokens: token 1 or later ones."""
        placement, now_s = booking.placement, self._clock.now()
        is_first = not booking.is_prefilled
        if is_first:
            booking.first = now_s, booking.num_tokens
            self._end_prefill(booking, now_s)
        decode, plan = placement.decode, booking.plan
        if decode is None or plan is None or not self._is_member(decode):
            return
        if is_first and placement.prefill is not None:
            self.decodes.activate(decode.slot, 1, _context(placement))
            self.handoffs.begin(decode.slot, booking.request.request_id, now_s)
            booking.is_under_way = True
        forecast, is_early = self.decodes.forecast, False
        if booking.is_under_way and booking.num_tokens > 1:
            self._end_handoff(booking, decode)
            is_early = not forecast.has_begun(plan, now_s)  # it joined sooner than planned
        if is_first or is_early or forecast.is_over(plan, now_s):
            self.decodes.forecast.remove(plan, now_s)
            self._plan(booking, decode, now_s, now_s)

    def steady_until_s(self, booking: Booking) -> float:
        """Until when further tokens of a request change nothing; 0: the next one does."""
        if not booking.is_prefilled or booking.is_under_way:
            return 0.0
        return inf if booking.plan is None else self.decodes.forecast.over_at_s(booking.plan)

    def ended(self, booking: Booking, *, by_itself: bool) -> None:
        """Remove a request that has finished, failed or been cancelled."""
        placement, now_s = booking.placement, self._clock.now()
        if by_itself and not booking.request.ends_with_prompt:
            self.lengths.observe(booking.num_tokens, placement.kind)
        self.means.ended(booking)
        decode, plan = placement.decode, booking.plan
        if decode is not None and plan is not None and self._is_member(decode):
            self.decodes.legs[decode.slot] -= 1
            self.decodes.shares.add(decode.slot, ServiceClass.of(booking.request.slo), -1)
            self.decodes.forecast.remove(plan, now_s)
            self._end_handoff(booking, decode)
            if by_itself and booking.first is not None:
                first_s, num_first = booking.first
                number = booking.num_tokens - num_first
                predicted_s = number * placement.tpot_s
                self._paces.observe(decode.slot, number, predicted_s, now_s - first_s)
            if booking.is_prefilled or placement.prefill is None:
                self.decodes.activate(decode.slot, -1, _context(placement))
        if not booking.is_prefilled:
            self._end_prefill(booking, now_s)

    def has_to_wait(self, booking: Booking) -> bool:
        """Whether it was handed off to a decode node that is predicted to have no place for it."""
        decode, plan, slo = booking.placement.decode, booking.plan, booking.request.slo
        if booking.placement.prefill is None or decode is None or plan is None:
            return False
        if not slo.tpot_s or not self._is_member(decode):
            return False
        slot, now_s = decode.slot, self._clock.now()
        yielding = self.decodes.yielding(ServiceClass.of(slo), now_s)
        with self.decodes.forecast.without(plan, now_s):  # a newcomer is not in the batch
            view = _newcomer(booking).view(self._fleet, self.decodes, now_s, yielding)
            has_place = view.has_place(slot)
        gives_way = yielding is not None and yielding[slot] > 0
        queues_up = not gives_way and self.handoffs.makes_wait(slot, slo.tpot_s, now_s)
        return queues_up or not has_place

    def left(self, booking: Booking) -> float:
        """Return the tokens that are expected to come."""
        expected = booking.placement.usual_tokens
        return remaining(expected, booking.request.sampling, booking.num_tokens)

    def pace_share(self, slot: int) -> float:
        """Return the share of the predicted time that a token of a stream takes (`StreamPaces`)."""
        return self._paces.share(slot)

    def is_overloaded(self, slot: int) -> bool:
        """Return whether a handed-off request waits at a node, and not just for a step to end."""
        longest_s = self.handoffs.longest_s(slot, self._clock.now())
        return longest_s > _PATIENCE * self._fleet.full_step_s(slot)

    def _end_handoff(self, booking: Booking, decode: Member) -> None:
        self.handoffs.end(decode.slot, booking.request.request_id)
        booking.is_under_way = False

    def _end_prefill(self, booking: Booking, now_s: float) -> None:
        booking.is_prefilled = True
        prefills = booking.placement.prefill or booking.placement.decode
        assert prefills is not None
        self.queues.pop(prefills, booking.request.request_id, now_s)

    def _plan(self, booking: Booking, decode: Member, now_s: float, ready_s: float) -> None:
        """Enter a leg that is ready at `ready_s` into the calendar.

        Until token 2, the predicted wait for a place is added before it joins the batch.
        """
        placement = booking.placement
        left = self.left(booking)
        in_gaps_s = placement.wait_s - placement.held_s
        pace_s = placement.tpot_s - in_gaps_s / max(placement.output_tokens - 1, 1)
        pace_s *= self._paces.share(decode.slot)
        join_s = ready_s + placement.wait_s * (booking.num_tokens <= 1)
        end_s = join_s + left * (pace_s or UNKNOWN_TPOT_S)
        booking.plan = self.decodes.forecast.add(
            decode.slot, now_s, join_s, end_s, _context(placement)
        )

    def _is_member(self, member: Member) -> bool:
        """Return whether the member still owns its slot."""
        return self._fleet.members[member.slot] is member

    def _reported(self, member: Member) -> None:
        self.queues.reported(member)
        self.decodes.reported(member)

    def _lost(self, member: Member) -> None:
        self.queues.clear(member.slot)
        self.decodes.clear(member.slot)
        self.handoffs.clear(member.slot)
        self._paces.clear(member.slot)


def _pending(slo: Slo, placement: Placement, now_s: float) -> PendingPrompt:
    due_s = now_s + slo.ttft_s if slo.ttft_s else inf
    return PendingPrompt(
        ServiceClass.of(slo), placement.idle_ttft_s, placement.prompt_tokens, due_s
    )


def _context(placement: Placement) -> int:
    """Return the context of the decode leg in tokens, averaged over its life."""
    return placement.prompt_tokens + placement.output_tokens // 2


def _newcomer(booking: Booking) -> Newcomer:
    """Return what the request needs from a decode batch."""
    placement = booking.placement
    num_tokens = placement.prompt_tokens + placement.output_tokens
    return Newcomer(_context(placement), num_tokens, booking.request.slo.tpot_s)
