"""Requests as they will be after a decode step that still runs.

Each goes on with one token. Which one is not known, but where it goes and how the next one is drawn
is. So the next step can be planned and laid out, for a device that will have the token by then
(`Batch.sampled_before`). Requests that end with their next token, whichever it is, are left out.
One that turns out to end with it, or is cancelled, is computed once in vain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Queues


def are_foreseeable(queues: Queues) -> bool:
    """Whether the step behind one of decodes has decodes only, and needs none of their tokens."""
    if queues.waiting or queues.preemptions.to_recall:
        return False
    return all(r.is_decoding and not r.follows_tokens for r in queues.running)


@contextmanager
def foreseen(queues: Queues, rows: Sequence[Scheduled]) -> Iterator[None]:
    """Have the requests as they will be after a step of these rows, until the context ends.

    The token that row i samples is -1 - i. Nothing may be preempted (`StepRuns`), nor look at the
    requests from another thread.
    """
    running = queues.running
    index_of = {row.request: index for index, row in enumerate(rows)}
    advanced: list[Request] = []
    going_on: list[Request] = []
    for request in running:
        index = index_of.get(request)
        if index is None:  # it has been adopted meanwhile, or was left out of the step
            going_on.append(request)
        elif not (request.is_cancelled or request.ends_with_next):
            request.num_computed_tokens += 1
            request.output_token_ids.append(-1 - index)
            advanced.append(request)
            going_on.append(request)
    queues.running, queues.are_foreseen = going_on, True
    try:
        yield
    finally:
        queues.running, queues.are_foreseen = running, False
        for request in advanced:
            request.num_computed_tokens -= 1
            request.output_token_ids.pop()
