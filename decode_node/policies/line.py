"""Who comes first of those that wait: prompts to be prefilled here, and requests handed over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from decode_node.policies.pace import Pace
from pdserve.engine.prompts.order import Prompt, PromptOrder
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.fair_share import FairShare
from pdserve.lifecycle import Targets

LATE_SHARE: Final = 0.05  # of the places in the batch, while others can still be in time
LATE: Final = Targets(payer="late", weight=LATE_SHARE)
TIMELY: Final = Targets(payer="timely", weight=1 - LATE_SHARE)


class Line:
    """Priority first, then who was preempted, then fair shares, then who can still be in time.

    Waiting for room falls between tokens 1 and 2, so it counts in TPOT. First come first served
    would make everybody wait in an overload until nobody's promise can be kept. So those whose TPOT
    is lost already come last, save for a small share of the places: they are to end, too. Nobody
    waits for one whose prompt is still computed elsewhere. Among equals whoever came first goes
    first. Prompts have an order of their own among themselves, by which chunks are given as well.
    """

    def __init__(self, prompts: PromptOrder, shares: FairShare, pace: Pace) -> None:
        """
        Args:
            prompts: their order.
            shares: of the payers; those by which `prompts` goes.
            pace: what was promised.
        """
        self._prompts = prompts
        self._shares = shares
        self._pace = pace
        self._late = FairShare(burst=1.0, lead=0.0)  # of places
        self._decoded: list[Request] = []  # by the last step ...
        self._parts: list[tuple[Targets, float]] = []  # ... and each payer's part of it

    def look(self, queues: Queues) -> None:
        """A step is planned: who wants something now?"""
        self._prompts.present([*queues.running, *queues.waiting, *queues.claims])

    def may_join(self, newcomer: Request, first: Request) -> bool:
        """As PromptOrder.may_join."""
        return self._prompts.may_join(newcomer, first)

    def yields_to(self, request: Request, other: Request) -> bool:
        """As FairShare.yields_to."""
        return self._shares.yields_to(request.targets, other.targets)

    def prompts(self, queues: Queues) -> list[Prompt]:
        """Those that have begun, and those that wait, in the order in which they get chunks."""
        begun = [request for request in queues.running if not request.is_decoding]
        return self._prompts.prompts([*begun, *queues.waiting], queues.pool)

    def first(self, queues: Queues) -> Request | None:
        """As DecodePolicy.first. Prefill legs join no batch, so nobody waits behind them."""
        waiting = [r for r in queues.waiting if r.decodes_here]
        of_prompts = self._prompts.sorted(waiting, queues.pool)[:1]
        in_line = of_prompts + queues.claims
        if len(in_line) < 2:
            return in_line[0] if in_line else None
        late = {request for request in in_line if self._is_late(request, queues)}
        self._late.present([LATE, TIMELY] if late else [TIMELY])
        is_turn_of_late = self._late.rank(LATE) < self._late.rank(TIMELY)

        def rank(request: Request) -> tuple[int, bool, float, bool, bool, float]:
            targets = request.targets
            is_elsewhere = request.lifecycle.prefill_end_s is None and request not in of_prompts
            return (
                -targets.priority,
                request.num_preemptions == 0,
                self._shares.rank(targets),
                (request in late) is not is_turn_of_late,
                is_elsewhere,
                request.lifecycle.received_s,
            )

        return min(in_line, key=rank)

    def charge_chunks(self, rows: Sequence[Scheduled], seconds: float) -> None:
        """A step spends so much time on these chunks of prompts."""
        self._prompts.charge(rows, seconds)

    def charge_decodes(self, queues: Queues, decoded: list[Request], seconds: float) -> None:
        """A step spends so much time on these, all of them alike."""
        if decoded != self._decoded:  # they are the same for many steps
            self._decoded, self._parts = decoded, _parts(decoded)
            for request in decoded:
                if len(request.output_token_ids) == 1:  # it has just joined
                    self._charge_place(request, queues)
        for payer, part in self._parts:
            self._shares.charge(payer, seconds * part)

    def _charge_place(self, request: Request, queues: Queues) -> None:
        if self._is_late(request, queues):
            self._late.charge(LATE, 1.0)
        else:
            self._late.charge(TIMELY, 1.0)

    def _is_late(self, request: Request, queues: Queues) -> bool:
        num_tokens_left = queues.headroom.estimate.remaining(request)
        return self._pace.is_past_saving(request, num_tokens_left)


def _parts(requests: Sequence[Request]) -> list[tuple[Targets, float]]:
    """How much of a step is each payer's."""
    payers: dict[tuple[int, str], list[Targets]] = {}
    for request in requests:
        targets = request.targets
        payers.setdefault((targets.priority, targets.payer), []).append(targets)
    return [(same[0], len(same) / len(requests)) for same in payers.values()]
