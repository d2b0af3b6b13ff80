"""Makes room for a request by preempting those that hold a place which is due to it."""

from __future__ import annotations

from decode_node.policies.interface import DecodePolicy
from decode_node.policies.places import YieldsTo, giving_way
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Queues


def make_way(queues: Queues, policy: DecodePolicy, yields_to: YieldsTo) -> None:
    """Preempt running requests for the first waiting request, if they have to give way to it.

    Preempts only as many as necessary, and none if preempting all of them would not be enough.
    Called between steps.
    """
    newcomer = _first_to_preempt(queues, policy)
    if newcomer is None:
        return
    victims = list(giving_way(queues, newcomer, yields_to))
    if not victims or not _fits(queues, policy, newcomer, victims):
        return  # checked first, since it may hold for many steps
    preempted: list[Request] = []
    for victim in victims:
        if _fits(queues, policy, newcomer, preempted):
            break
        preempted.append(victim)
    for victim in preempted:
        victim.gave_place = victim.targets.priority == newcomer.targets.priority
        queues.preempt(victim, for_priority=True)


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


def _fits(
    queues: Queues, policy: DecodePolicy, newcomer: Request, preempted: list[Request]
) -> bool:
    """Whether the newcomer could be admitted if these requests were preempted."""
    if queues.num_missing(newcomer, preempted):
        return False
    members = [r for r in queues.beside(newcomer) if r not in preempted]
    return policy.has_place(members, newcomer)
