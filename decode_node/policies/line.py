"""The order of waiting requests: prompts to be prefilled here, and requests handed off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from decode_node.policies.pace import Pace
from pdserve.engine.prompts.order import Prompt, PromptOrder
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.fair_share import FairShare
from pdserve.lifecycle import Targets

LOST_SHARE: Final = 0.05  # of the places in the batch, while others can still keep their TPOT
TPOT_LOST: Final = Targets(payer="TPOT lost", weight=LOST_SHARE)
TPOT_KEPT: Final = Targets(payer="TPOT can be kept", weight=1 - LOST_SHARE)


class Line:
    """Orders by priority, then preempted ones, then fair shares, then who can still meet its TPOT.

    A request that was interrupted on another node is as one that was preempted here. A preempted
    request whose place was due to another payer waits for its own payer's turn. Waiting for room
    falls between tokens 1 and 2, so it counts in TPOT. In an overload, first come first served
    would make all requests wait until none of them can meet its TPOT. So requests whose TPOT is
    already lost come last, except for a small share of the places, so that they complete too. No
    request waits for one whose prompt is still being prefilled on another node. Ties are broken by
    arrival. Prompts are ordered among themselves by a prompt order, which also distributes chunks.
    """

    def __init__(self, prompts: PromptOrder, shares: FairShare, pace: Pace) -> None:
        """
        Args:
            prompts: the order of prompts.
            shares: the fair shares of the payers; the same that `prompts` uses.
            pace: predicted step times and promised latencies.
        """
        self._prompts = prompts
        self._shares = shares
        self._pace = pace
        self._places = FairShare(burst=1.0)  # between TPOT_LOST and TPOT_KEPT
        self._decoded: list[Request] = []  # requests decoded by the last step ...
        self._parts: list[tuple[Targets, float]] = []  # ... and each payer's share of that step

    def look(self, queues: Queues) -> None:
        """Note which requests are present, before a step is planned."""
        self._prompts.present([*queues.running, *queues.waiting, *queues.claims])

    def may_join(self, newcomer: Request, first: Request) -> bool:
        """As PromptOrder.may_join."""
        return self._prompts.may_join(newcomer, first)

    def yields_to(self, request: Request, other: Request) -> bool:
        """As FairShare.yields_to."""
        return self._shares.yields_to(request.targets, other.targets)

    def prompts(self, queues: Queues) -> list[Prompt]:
        """Return the prompts that have begun or wait, in the order in which they get chunks."""
        begun = [request for request in queues.running if not request.is_decoding]
        return self._prompts.prompts([*begun, *queues.waiting], queues.pool)

    def first(self, queues: Queues) -> Request | None:
        """As DecodePolicy.first. Prefill legs do not join, so no request waits behind them."""
        waiting = [r for r in queues.waiting if r.decodes_here]
        of_prompts = self._prompts.sorted(waiting, queues.pool)[:1]
        in_line = of_prompts + queues.claims
        if len(in_line) < 2:
            return in_line[0] if in_line else None
        lost = {request for request in in_line if self._has_lost_tpot(request, queues)}
        self._places.present([TPOT_LOST, TPOT_KEPT] if lost else [TPOT_KEPT])
        is_turn_of_lost = self._places.rank(TPOT_LOST) < self._places.rank(TPOT_KEPT)

        def rank(request: Request) -> tuple[int, bool, float, bool, bool, float]:
            targets = request.targets
            is_elsewhere = request.lifecycle.prefill_end_s is None and request not in of_prompts
            return (
                -targets.priority,
                not request.goes_on or request.gave_place,
                self._shares.rank(targets),
                (request in lost) is not is_turn_of_lost,
                is_elsewhere,
                request.lifecycle.received_s,
            )

        return min(in_line, key=rank)

    def charge_chunks(self, rows: Sequence[Scheduled], seconds: float) -> None:
        """Charge the payers of these prompt chunks for `seconds` of a step."""
        self._prompts.charge(rows, seconds)

    def charge_decodes(self, queues: Queues, decoded: list[Request], seconds: float) -> None:
        """Charge the payers of these decodes for `seconds` of a step, the same for each request."""
        if decoded != self._decoded:  # usually unchanged for many steps
            self._decoded, self._parts = decoded, _parts(decoded)
            for request in decoded:
                if len(request.output_token_ids) == 1:  # it has just joined
                    self._charge_place(request, queues)
        for payer, part in self._parts:
            self._shares.charge(payer, seconds * part)

    def repeated(self, seconds: Sequence[float]) -> None:
        """Do what `look` and `charge_decodes` do, for steps of these seconds like the last one."""
        self._shares.serve(self._prompts.payers, self._parts, seconds)

    def _charge_place(self, request: Request, queues: Queues) -> None:
        payer = TPOT_LOST if self._has_lost_tpot(request, queues) else TPOT_KEPT
        self._places.charge(payer, 1.0)

    def _has_lost_tpot(self, request: Request, queues: Queues) -> bool:
        num_tokens_left = queues.headroom.remaining(request)
        return self._pace.has_lost_tpot(request, num_tokens_left)


def _parts(requests: Sequence[Request]) -> list[tuple[Targets, float]]:
    """Return each payer's share of a step that decodes these requests."""
    payers: dict[tuple[int, str], list[Targets]] = {}
    for request in requests:
        targets = request.targets
        payers.setdefault((targets.priority, targets.payer), []).append(targets)
    return [(same[0], len(same) / len(requests)) for same in payers.values()]
