"""Whose places in a full batch are for others: a flood fills its own share, not the node.

Payers of equal priority may use all places that nobody else wants. A request of a payer that has
fewer places for its weight than another one is given one of the other's, as long as that leaves the
other no fewer than itself. So places settle at equal shares, and nobody gives way in turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pdserve.engine.request import Request
from pdserve.engine.scheduler import Queues
from pdserve.lifecycle import Targets


def giving_way(queues: Queues, newcomer: Request) -> Iterator[Request]:
    """Yield the running requests that may be preempted for the newcomer, in that order."""
    targets = newcomer.targets
    surplus = _surplus(queues.streams, targets)
    for request in queues.victims.in_order(queues.running):
        theirs = request.targets
        if theirs.priority < targets.priority:
            yield request
        elif theirs.priority == targets.priority and surplus[theirs.payer] > 0:
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
