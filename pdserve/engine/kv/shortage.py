"""How a shortage of blocks is met: some stay free at admission, and requests are preempted.

A request admitted too early is preempted or preempts others, so that KV is computed or copied
twice. A request admitted too late waits although blocks are free. So admission leaves some for the
tokens that streams will still generate. There are three strategies, after TetriInfer:

    greedy           one block per stream; later shortage is left to preemption (vLLM)
    reserve-static   the maximum that streams may still need: never preempts for blocks (Orca)
    reserve-dynamic  the expected peak need over the expected ends of the streams; blocks of streams
                     that end earlier count as free by then (LightLLM's past-future)

A preempted request's full blocks stay in the prefix cache under their hashes, and in the host tier
if there is one: blocks are written to the tier when they become idle, so they are swapped out
already. Blocks that have been overwritten by the time there is room again are restored in the way
that is predicted to be fastest: from the tier (swap), from the node that prefilled them (re-pull),
or by recomputation. The node does the first two, with the requests in `to_recall`; recomputation
needs no special action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request, next_due_s
from pdserve.kv import need
from pdserve.measured.output_lengths import OutputLengths, remaining
from pdserve.settings.config import Headroom, PolicyConfig


def max_remaining(request: Request) -> int:
    """Return the maximum number of tokens that the request may still generate."""
    return max(0, request.sampling.max_tokens - len(request.output_token_ids))


Remaining = Callable[[Request], float]
"""request -> tokens that it is expected to generate."""

Growth = Callable[[Sequence[Request], Remaining, int], int]
"""(streams, remaining, block size) -> blocks that they need beyond those they have now."""


def greedy(streams: Sequence[Request], remaining: Remaining, block_size: int) -> int:
    """Return one block for each stream that has blocks."""
    return sum(1 for stream in streams if stream.block_table)


def reserve_static(streams: Sequence[Request], remaining: Remaining, block_size: int) -> int:
    """Return the blocks that the streams need if all of them reach `max_tokens`."""
    return sum(
        max(
            0,
            need.blocks_for(s.num_tokens + max_remaining(s), block_size) - _num_held(s, block_size),
        )
        for s in streams
    )


def reserve_dynamic(streams: Sequence[Request], remaining: Remaining, block_size: int) -> int:
    """Return the peak of the expected need until the last stream has ended.

    The need grows until a stream ends and frees its blocks, so only these points in time are
    evaluated.
    """
    ends = sorted((remaining(s), _num_held(s, block_size)) for s in streams)
    num_freed = num_needed = 0
    for num_ended, (num_tokens, num_held) in enumerate(ends):
        num_left = len(ends) - num_ended
        # Each stream takes a block within block_size tokens, however full its last block is now.
        grown = num_left + int(num_left * num_tokens / block_size)
        num_needed = max(num_needed, grown - num_freed)
        num_freed += num_held
    return num_needed


_GROWTH: Final[dict[Headroom, Growth]] = {
    "greedy": greedy,
    "reserve-static": reserve_static,
    "reserve-dynamic": reserve_dynamic,
}


class KvHeadroom:
    """The headroom strategy of one pool, with the lengths of its answers.

    They count for requests of which no coordinator has said how long their answers usually are.
    """

    def __init__(
        self, block_size: int, name: Headroom = "greedy", num_watermark_blocks: int = 0
    ) -> None:
        """
        Args:
            block_size: in tokens.
            name: which strategy to use.
            num_watermark_blocks: kept free in addition, for unexpected need.
        """
        self.lengths = OutputLengths()
        self._block_size = block_size
        self._growth = _GROWTH[name]
        self._num_watermark_blocks = num_watermark_blocks

    def remaining(self, request: Request) -> float:
        """Return how many more tokens this request is expected to generate."""
        expected = request.expected_output or self.lengths.mean_tokens
        return remaining(expected, request.sampling, len(request.output_token_ids))

    def num_kept_free(self, streams: Sequence[Request], newcomer: Request | None) -> int:
        """Return the blocks to leave free besides the newcomer's own; 0 if there are no streams.

        Args:
            streams: requests that decode here, or will.
            newcomer: the request to be admitted; None if it will not decode here.
        """
        if not streams:
            return 0
        grown = [*streams, newcomer] if newcomer is not None else streams
        return self._growth(grown, self.remaining, self._block_size) + self._num_watermark_blocks


def make_headroom(policy: PolicyConfig, pool: BlockPool) -> KvHeadroom:
    """Make the strategy that `policy.kv_headroom` names, for this pool."""
    num_watermark_blocks = int(policy.watermark * pool.num_blocks)
    return KvHeadroom(pool.block_size, policy.kv_headroom, num_watermark_blocks)


def _num_held(request: Request, block_size: int) -> int:
    """Return the blocks that a request has; for a newcomer, those that it will be given."""
    return len(request.block_table) or need.blocks_for(request.num_tokens, block_size)


@dataclass(frozen=True, slots=True)
class Victims:
    """Says which request to preempt when no block is free, or for one that must have its place.

    The lowest priority is preempted first; within a priority, the request whose next token is due
    last, that is with the most slack (TaiChi, Kairos). A request that was preempted
    `max_preemptions` times is spared as long as there is another candidate, so that no request
    starves. If there is none, it gives way again: otherwise whoever has priority over it would wait
    until it ends. Beside a long prompt that another engine computes at the moment (multiplexed
    mode), a stream that needs a block may have to give way itself: the prompt is no candidate until
    its step has ended.
    """

    max_preemptions: int = 3

    def choose(self, running: Iterable[Request], needy: Request) -> Request:
        """Return the request to preempt for a block that `needy` must have; may be `needy` itself.

        `needy` is running. Requests of higher priority are never chosen. If all candidates have
        reached `max_preemptions`, the youngest of the lowest priority is chosen, so that the oldest
        one completes, then the next.
        """
        priority = needy.targets.priority
        candidates = [r for r in running if _can_give_way(r) and r.targets.priority <= priority]
        fresh = [r for r in candidates if r.num_preemptions < self.max_preemptions]
        if fresh:
            return min(fresh, key=_spared)
        return min(candidates, key=_age, default=needy)

    def in_order(self, running: Iterable[Request]) -> list[Request]:
        """Return the requests that may be preempted at all, in order of preemption."""

        def key(request: Request) -> tuple[int, bool, tuple[int, float, float]]:
            is_spared = request.num_preemptions >= self.max_preemptions
            return request.targets.priority, is_spared, _spared(request)

        return sorted(filter(_can_give_way, running), key=key)


def _can_give_way(request: Request) -> bool:
    """Whether a request may be preempted.

    Prefill legs may not: their blocks are already announced to other nodes, and they end soon.
    """
    return not request.is_prefill_leg


def _spared(request: Request) -> tuple[int, float, float]:
    """Sort key; the smallest is preempted first. Without SLOs, the last to arrive (as in vLLM)."""
    return request.targets.priority, -next_due_s(request), -request.lifecycle.received_s


def _age(request: Request) -> tuple[int, float]:
    return request.targets.priority, -request.lifecycle.received_s


@dataclass(slots=True)
class PreemptionStatistics:
    """Counters of preemptions and of how KV was restored."""

    for_blocks: int = 0  # preemptions because a stream could not get a block
    for_priority: int = 0  # preemptions in favour of a request of higher priority
    recalls: int = 0  # preempted requests whose KV was fetched before readmission
    swapped_tokens: int = 0  # of preempted requests, restored from the host tier
    pulled_tokens: int = 0  # of preempted requests, pulled from another node
    cached_tokens: int = 0  # found in the pool at readmission, fetched ones included
    computed_tokens: int = 0  # not found at readmission, and so recomputed

    @property
    def total(self) -> int:
        """Number of preemptions."""
        return self.for_blocks + self.for_priority


CouldFetch = Callable[[Request], bool]
"""Whether KV of a preempted request is elsewhere; asked when there is room for the request."""


def all_recomputed(_: Request) -> bool:
    """The default `CouldFetch`: no KV is elsewhere."""
    return False


class Preemptions:
    """The preempted requests of one engine."""

    def __init__(self, block_size: int, could_fetch: CouldFetch) -> None:
        self.statistics = PreemptionStatistics()
        self.to_recall: list[Request] = []  # their KV is to be fetched; the loop takes them out
        self.away: set[Request] = set()  # being recalled: in no queue, without blocks
        self._could_fetch = could_fetch
        self._unasked: set[Request] = set()  # not asked for since their last preemption
        self._block_size = block_size
        self._num_closed_steps = 0
        self._closed_priority = 0

    def preempted(self, request: Request, *, for_priority: bool) -> None:
        """Record that a request was preempted and has lost its blocks."""
        request.num_preemptions += 1
        self._unasked.add(request)
        if for_priority:
            self.statistics.for_priority += 1
            return
        self.statistics.for_blocks += 1
        # Within block_size steps, every stream takes one more block. Blocks that are still free
        # after that stay free.
        was_closed = self._num_closed_steps > 0
        self._num_closed_steps = self._block_size
        priority = request.targets.priority
        self._closed_priority = max(self._closed_priority, priority) if was_closed else priority

    def steps_planned(self, count: int = 1) -> None:
        """Count steps since the last preemption."""
        self._num_closed_steps = max(0, self._num_closed_steps - count)

    def keeps_out(self, request: Request, *, is_alone: bool) -> bool:
        """Whether a request must wait because of a recent preemption.

        A request admitted right after a preemption would cause the next one. Newcomers also wait
        for requests that are being recalled, which have waited for longer. Requests of higher
        priority are not kept out; nor does the first rule hold if no stream is here (`is_alone`).
        """
        priority = request.targets.priority
        if self._num_closed_steps > 0 and not is_alone and priority <= self._closed_priority:
            return True
        return request.num_preemptions == 0 and any(
            priority <= other.targets.priority for other in self.away
        )

    def calls_back(self, request: Request) -> bool:
        """Whether a request's KV is being recalled. Asks `could_fetch` once per preemption."""
        if request not in self._unasked:
            return False
        self._unasked.discard(request)
        if not self._could_fetch(request):
            return False
        self.statistics.recalls += 1
        self.to_recall.append(request)
        self.away.add(request)
        return True

    def came_back(self, request: Request) -> None:
        """Record that a preempted request has blocks again, and how much of its KV was found."""
        self.statistics.cached_tokens += request.num_computed_tokens
        self.statistics.computed_tokens += request.num_uncomputed_tokens

    def forget(self, request: Request) -> None:
        """Drop a request that has ended."""
        self._unasked.discard(request)
        self.away.discard(request)
