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
    wanted = request.block_hashes[: (request.num_tokens - 1) // size]
    own = wanted[: len(pool.match_prefix(wanted))]
    missing = wanted[len(own) : len(source.pool.match_prefix(wanted))]
    seconds = _pull_s(target, len(missing) * size)
    if not missing or not _is_room(target, own, missing) or not _is_worth(target, own, missing):
        then()
        return
    held = pool.take_prefix(own)
    filled = pool.allocate(len(missing))

    def arrived() -> None:
        target.interrupt()
        for block_id, block_hash in zip(filled, missing, strict=True):
            pool.publish(block_id, block_hash)
        pool.release([*held, *filled])
        then()

    events.after(seconds, arrived)


def _pull_s(target: Node, num_tokens: int) -> float:
    machine = target.machine
    num_bytes = machine.pulled_bytes(num_tokens, num_tokens)
    return machine.transfer.fixed_s + num_bytes / machine.transfer.bytes_per_s


def _is_room(target: Node, own: Sequence[bytes], missing: Sequence[bytes]) -> bool:
    pool = target.pool
    headroom = Headroom(pool, lambda: num_spoken_for(target.core.queues))
    num_taken = pool.num_free - pool.num_free_after_taking(pool.match_prefix(own))
    return num_taken + len(missing) <= headroom.num_spare


def _is_worth(target: Node, own: Sequence[bytes], missing: Sequence[bytes]) -> bool:
    size, budget = target.pool.block_size, target.machine.token_budget
    num_tokens = len(missing) * size
    compute_s = target.perf.prefill_s(num_tokens, len(own) * size, budget)
    return is_worth_pulling(Forecast(_pull_s(target, num_tokens), compute_s))
