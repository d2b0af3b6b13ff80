"""Whose places in a full batch are for others: a flood fills its own share, not the node.

Payers of equal priority may use all places that nobody else wants. If one has got more service than
another, by over a burst (`FairShare.yields_to`), and has more places for its weight, requests of
the other are given some of them, as long as that leaves the first one no fewer. So places settle at
equal shares, and nobody gives way in turns. Payers that ask for about the same wait for each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from decode_node.policies.interface import DecodePolicy
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Queues
from pdserve.lifecycle import Targets

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
