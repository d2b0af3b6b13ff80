"""Makes room for a request of higher priority by preempting running requests."""

from __future__ import annotations

from decode_node.policies.interface import DecodePolicy
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Queues


def make_way(queues: Queues, policy: DecodePolicy) -> None:
    """Preempt running requests for the first waiting request, if it has priority over them.

    Preempts only as many as necessary, and none if preempting all of them would not be enough.
    Called between steps.
    """
    newcomer = _first_to_preempt(queues, policy)
    if newcomer is None:
        return
    victims = queues.victims.below(queues.running, newcomer.targets.priority)
    if not _fits(queues, policy, newcomer, victims):
        return  # checked first, since it may hold for many steps
    preempted: list[Request] = []
    for victim in victims:
        if _fits(queues, policy, newcomer, preempted):
            break
        preempted.append(victim)
    for victim in preempted:
        queues.preempt(victim, for_priority=True)


def _first_to_preempt(queues: Queues, policy: DecodePolicy) -> Request | None:
    """Return the first waiting request if any waiting request has priority over a running one."""
    in_line = [*queues.waiting, *queues.claims]
    if not in_line or not queues.running:
        return None
    lowest = min(request.targets.priority for request in queues.running)
    if all(request.targets.priority <= lowest for request in in_line):
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
