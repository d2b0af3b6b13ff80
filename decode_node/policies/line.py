"""The order of waiting requests: prompts to be prefilled here, and requests handed off; and whose
places in a full batch are for others.

A flood fills its own share, not the node. Payers of equal priority may use all places that nobody
else wants. If one has got more service than another, by over a burst (`FairShare.yields_to`), and
has more places for its weight, requests of the other are given some of them, as long as that leaves
the first one no fewer. So places settle at equal shares, and nobody gives way in turns. Payers that
ask for about the same wait for each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

from decode_node.policies.interface import DecodePolicy
from decode_node.policies.pace import Pace
from pdserve.engine.prompts.order import PromptOrder, QueuedPrompt
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.lifecycle import Targets
from pdserve.shared.fair_share import FairShare

LOST_SHARE: Final = 0.05  # of the places in the batch, while others can still keep their TPOT
TPOT_LOST: Final = Targets(payer="TPOT lost", weight=LOST_SHARE)
TPOT_KEPT: Final = Targets(payer="TPOT can be kept", weight=1 - LOST_SHARE)


class DecodeLine:
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

    def prompts(self, queues: Queues) -> list[QueuedPrompt]:
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
                self.after(request, queues),
            )

        return min(in_line, key=rank)

    def after(self, request: Request, queues: Queues) -> float:
        """Return what decides between equals; the least goes first."""
        return request.lifecycle.received_s

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

    def charge(self, request: Request, seconds: float) -> None:
        """Charge a request's payer for `seconds` of a step."""
        self._shares.charge(request.targets, seconds)

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


YieldsTo: TypeAlias = Callable[[Request, Request], bool]  # as FairShare.yields_to


def make_way(queues: Queues, policy: DecodePolicy, yields_to: YieldsTo) -> None:
    """Preempt running requests for the first waiting request, if they have to give way to it.

    Preempts only as many as necessary, and none if preempting all of them would not be enough.
    Called between steps.
    """
    newcomer = _first_to_preempt(queues, policy)
    if newcomer is None:
        return
    victims = list(giving_way(queues, newcomer, yields_to))
    if not victims or not fits(queues, policy, newcomer, victims):
        return  # checked first, since it may hold for many steps
    preempted: list[Request] = []
    for victim in victims:
        if fits(queues, policy, newcomer, preempted):
            break
        preempted.append(victim)
    for victim in preempted:
        queues.preempt(victim, for_priority=True)
        victim.gave_place = victim.targets.priority == newcomer.targets.priority


def giving_way(queues: Queues, newcomer: Request, yields_to: YieldsTo) -> Iterator[Request]:
    """Yield the running requests that may be preempted for the newcomer, in that order."""
    targets = newcomer.targets
    surplus = _surplus(queues.streams, targets)
    for request in queues.victims.in_order(queues.between_steps):
        theirs = request.targets
        if theirs.priority < targets.priority:
            yield request
        elif (
            theirs.priority == targets.priority
            and surplus[theirs.payer] > 0
            and yields_to(request, newcomer)
        ):
            surplus[theirs.payer] -= 1
            yield request


def _surplus(streams: Sequence[Request], targets: Targets) -> Counter[str]:
    """Return the places of each other payer of equal priority that this payer has a claim to."""
    equals = [r.targets for r in streams if r.targets.priority == targets.priority]
    places = Counter(equal.payer for equal in equals)
    weights = {equal.payer: equal.weight for equal in equals}
    own = (places[targets.payer] + 1) / targets.weight
    return Counter(
        {
            payer: int(num_places - own * weights[payer])
            for payer, num_places in places.items()
            if payer != targets.payer and num_places > own * weights[payer]
        }
    )


def _first_to_preempt(queues: Queues, policy: DecodePolicy) -> Request | None:
    """Return the first waiting request, if a running one might have to give way to it."""
    in_line = [*queues.waiting, *queues.claims]
    if not in_line or not queues.running:
        return None
    payers = {(r.targets.priority, r.targets.payer) for r in (*queues.running, *in_line)}
    if len(payers) == 1:
        return None  # the usual case, which needs no ordering
    first = policy.first(queues)
    return None if first is None or queues.is_closed_to(first) else first


def fits(
    queues: Queues, policy: DecodePolicy, newcomer: Request, preempted: Sequence[Request] = ()
) -> bool:
    """Whether there are blocks and a place for the newcomer if these requests were preempted."""
    if queues.num_missing(newcomer, preempted):
        return False
    members = [r for r in queues.beside(newcomer) if r not in preempted]
    return policy.has_place(members, newcomer)
