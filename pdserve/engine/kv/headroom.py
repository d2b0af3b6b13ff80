"""How many blocks to leave free at admission, for the tokens that streams will still generate.

A request admitted too early is preempted or preempts others, so that KV is computed or copied
twice. A request admitted too late waits although blocks are free. There are three strategies, after
TetriInfer:

    greedy           one block per stream; later shortage is left to preemption (vLLM)
    reserve-static   the maximum that streams may still need: never preempts for blocks (Orca)
    reserve-dynamic  the expected peak need over the expected ends of the streams; blocks of streams
                     that end earlier count as free by then (LightLLM's past-future)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request
from pdserve.kv import need
from pdserve.measured.output_lengths import OutputLengths
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
    """The headroom strategy of one pool, with the lengths of its answers."""

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
        return self.lengths.remaining(request.sampling, len(request.output_token_ids))

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
