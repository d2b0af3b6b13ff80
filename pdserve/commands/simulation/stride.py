"""A stride: steps of a batch that does not change, taken without looking at every row.

While every row decodes and nothing arrives, one step is like the one before. So their times are
computed ahead, and the rows are brought up to date only when somebody looks (`Node.sync`), or wants
to change something (`Node.interrupt`). What a step does to the node's own state is then done for
each of them, in their order: the results are the same, to the last bit, as with single steps.

A stride ends with the first step that does more: one that ends a row, or before which a block would
have to be taken from a stream. Where the front has to hear of a token, or of an eviction, it stops,
and goes on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request, Scheduled
from pdserve.measured.perf_model import StepShape

MOST_STEPS = 256  # computed ahead at a time


@dataclass(slots=True, eq=False)
class Stride:
    """Steps of one batch. The last one ends it; the ones before it are skipped."""

    rows: list[Scheduled]
    shape: StepShape  # of the first step; the context grows by a token per row and step
    ends_s: list[float]  # when each step ends
    seconds: list[float]  # of each step
    factors: list[float]  # that were drawn for it
    stops: list[int] = field(default_factory=list)  # steps at whose ends the node must be told
    num_done: int = 0  # steps that the rows have been brought up to
    num_stopped: int = 0
    tells_at: int = 0  # step at whose end somebody has to hear of a row's token; it goes on then
    armed: int = 0  # number of the stop that is scheduled; earlier ones are void

    @classmethod
    def of(
        cls,
        rows: list[Scheduled],
        shape: StepShape,
        now_s: float,
        seconds: list[float],
        factors: list[float],
    ) -> Stride:
        """Make a stride that begins now."""
        _, *ends_s = accumulate(seconds, initial=now_s)
        return cls(rows, shape, ends_s, seconds, factors)

    @property
    def last(self) -> int:
        """Index of the last step."""
        return len(self.ends_s) - 1

    @property
    def next_stop(self) -> int:
        """The next step at whose end the node does something."""
        return min(self.stops[self.num_stopped], self.tells_at)

    def shape_at(self, index: int) -> StepShape:
        """Return the shape of a step."""
        shape = self.shape
        return StepShape(
            shape.num_tokens,
            shape.num_sampled,
            0,
            shape.decode_context + index * len(self.rows),
        )

    def num_over(self, now_s: float) -> int:
        """Return how many of the skipped steps have ended."""
        return min(bisect_right(self.ends_s, now_s), self.last)

    def cut(self, num_steps: int) -> list[float]:
        """Shorten to `num_steps` steps; return the factors drawn for the others."""
        unused = self.factors[num_steps:]
        del self.ends_s[num_steps:], self.seconds[num_steps:], self.factors[num_steps:]
        self.stops = [num_steps - 1]
        self.num_stopped = 0
        return unused


def most_steps(requests: Sequence[Request], pool: BlockPool) -> int:
    """Return for how many steps the free blocks suffice, whichever of the rows grow."""
    size, num_free = pool.block_size, pool.num_free
    # Each row takes a block within `size` steps, and one more for every `size` steps after them.
    rounds = num_free // len(requests)
    return min(rounds * size, MOST_STEPS)


def stops_of(stride: Stride, pool: BlockPool) -> list[int]:
    """Return the steps after which a block has to be evicted, and the last one.

    Others must hear of an eviction when it happens. A block goes to a row before the step that
    writes its first token there. The rows are as after the steps that are done.
    """
    size, done, last = pool.block_size, stride.num_done, stride.last
    num_unused = pool.num_free - pool.num_cached
    if len(stride.rows) * ((last - done) // size + 1) <= num_unused:
        return [last]
    grown = sorted(
        index
        for request, _ in stride.rows
        for index in range(done + _first_growth(request, size), last, size)
    )
    return [*sorted(set(grown[num_unused:])), last]


def advance_rows(stride: Stride, first: int, end: int, pool: BlockPool) -> None:
    """Do to the requests and the pool what the steps [first, end) of the stride do to them.

    This includes the growth for the step after them, which has been planned, unless it is the end
    of the stride.
    """
    size, num_steps, num_grown = pool.block_size, end - first, min(end, stride.last) - first
    changes = []  # (step, 0: publish or 1: grow, row, block)
    for row, (request, _) in enumerate(stride.rows):
        before, output = request.num_computed_tokens, request.output_token_ids
        changes += [
            (index, 1, row, 0) for index in range(_first_growth(request, size), num_grown, size)
        ]
        for block in range(before // size, (before + num_steps) // size):
            changes.append(((block + 1) * size - before - 1, 0, row, block))
        output.extend([output[-1]] * num_steps)
        request.num_computed_tokens = before + num_steps
    changes.sort()
    for _, is_growth, row, block in changes:
        request = stride.rows[row].request
        if is_growth:
            request.block_table += pool.allocate(1)
        else:
            request.extend_hashes((block + 1) * size, size)
            pool.publish(request.block_table[block], request.block_hashes[block])


def _first_growth(request: Request, block_size: int) -> int:
    """Return the step after whose end the request needs a block more."""
    return len(request.block_table) * block_size - request.num_computed_tokens - 1
