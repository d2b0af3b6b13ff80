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

from pdserve.engine.request import Request
from pdserve.engine.scheduler import Queues
from pdserve.lifecycle import Targets

YieldsTo: TypeAlias = Callable[[Request, Request], bool]  # as FairShare.yields_to


def giving_way(queues: Queues, newcomer: Request, yields_to: YieldsTo) -> Iterator[Request]:
    """Yield the running requests that may be preempted for the newcomer, in that order."""
    targets = newcomer.targets
    surplus = _surplus(queues.streams, targets)
    for request in queues.victims.in_order(queues.running):
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
