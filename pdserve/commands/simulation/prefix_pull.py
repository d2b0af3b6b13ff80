"""Pulls a prompt's prefix from a node that holds more of it than the prompt's own node.

As `pdserve/node/prefixes/fetch.py`, without failures: a pull fills spare blocks, which are
published under their hashes and released, so that they are found like any other prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdserve.commands.simulation.events import Events
from pdserve.commands.simulation.node import Node
from pdserve.engine.request import Request
from pdserve.node.prefixes.cost import Forecast, is_worth_pulling
from pdserve.node.prefixes.headroom import Headroom, num_spoken_for


def pull_prefix(
    request: Request, source: Node, target: Node, events: Events, then: Callable[[], None]
) -> None:
    """Pull what `source` has of the prefix into `target`, then call `then`.

    `then` is called at once if there is nothing to pull, no room, or the pull is not worth it.
    """
    source.sync()
    target.interrupt()
    pool, size = target.pool, target.pool.block_size
    request.extend_hashes(request.num_tokens, size)
    # The last token is always computed: without its logits there is no next one.
    usable = request.block_hashes[: (request.num_tokens - 1) // size]
    there, wanted = _goal(source, usable)
    num_saved = there - len(_usable(target, usable))
    own = wanted[: len(pool.match_prefix(wanted))]
    missing = wanted[len(own) :]
    seconds = _pull_s(target, len(missing) * size)
    is_room = num_saved > 0 and _is_room(target, own, missing)
    if not is_room or not _is_worth(target, seconds, there, num_saved):
        then()
        return
    held = pool.take_prefix(own)
    filled = pool.allocate(len(missing))

    def arrived() -> None:
        target.interrupt()
        for block_id, block_hash in zip(filled, missing, strict=True):
            pool.publish(block_id, block_hash)
        if pool.snapshots is not None:
            pool.snapshots.found(wanted[there - 1], pool.tokens_in(there))
        pool.release([*held, *filled])
        then()

    events.after(seconds, arrived)


def _usable(node: Node, hashes: Sequence[bytes]) -> Sequence[bytes]:
    """What a node has of these, as far as a request can go on behind it."""
    return node.pool.usable(hashes[: len(node.pool.match_prefix(hashes))])


def _goal(source: Node, hashes: Sequence[bytes]) -> tuple[int, list[bytes]]:
    """How many of these blocks to pull, and all that is pulled: with a snapshot, if there are."""
    there, snapshots = _usable(source, hashes), source.pool.snapshots
    of_state = snapshots.hashes_of(there[-1]) if snapshots is not None and there else []
    return len(there), [*there, *of_state]


def _pull_s(target: Node, num_tokens: int) -> float:
    machine = target.machine
    num_bytes = machine.pulled_bytes(num_tokens, num_tokens)
    return machine.transfer.fixed_s + num_bytes / machine.transfer.bytes_per_s


def _is_room(target: Node, own: Sequence[bytes], missing: Sequence[bytes]) -> bool:
    pool = target.pool
    headroom = Headroom(pool, lambda: num_spoken_for(target.core.queues))
    num_taken = pool.num_free - pool.num_free_after_taking(pool.match_prefix(own))
    return num_taken + len(missing) <= headroom.num_spare


def _is_worth(target: Node, seconds: float, num_blocks: int, num_saved: int) -> bool:
    """Whether pulling, which takes so long, is faster than computing the last `num_saved`."""
    size, budget = target.pool.block_size, target.machine.token_budget
    compute_s = target.perf.prefill_s(num_saved * size, (num_blocks - num_saved) * size, budget)
    return is_worth_pulling(Forecast(seconds, compute_s))
