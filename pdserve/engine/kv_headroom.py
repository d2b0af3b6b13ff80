"""How many blocks stay free at admission, for the tokens that streams will still get.

Whoever is let in too early is preempted, or preempts others: KV is computed or copied twice.
Whoever is let in too late waits beside blocks that stand empty. Three ways, after TetriInfer:

    greedy           a block for each stream; what comes later is preemption's business (vLLM)
    reserve-static   all that streams may still get: nobody is ever preempted for blocks (Orca)
    reserve-dynamic  what streams are expected to need at the worst of their expected ends; blocks
                     of those that end before are counted as free by then (LightLLM's past-future)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from pdserve.config import Headroom
from pdserve.engine.request import Request

GUESS_TOKENS: Final = 256.0  # of an answer, until some have ended
ENDED_WEIGHT: Final = 0.05  # of the newest answer in the moving average, once there were a few
OUTLIVED: Final = 0.25  # of the mean length is expected of an answer that is longer already


class OutputEstimate:
    """How long answers are: a moving average, and `max_tokens` as what they never exceed."""

    def __init__(self, mean_tokens: float = GUESS_TOKENS) -> None:
        self.mean_tokens = mean_tokens
        self._num_ended = 0

    def observe(self, num_tokens: int) -> None:
        """An answer ended with so many tokens. The guess counts as one answer."""
        self._num_ended += 1
        weight = max(ENDED_WEIGHT, 1 / (1 + self._num_ended))
        self.mean_tokens += weight * (num_tokens - self.mean_tokens)

    def remaining(self, request: Request) -> float:
        """Tokens that this one is expected to get from now on."""
        num_so_far = len(request.output_token_ids)
        expected = max(self.mean_tokens - num_so_far, OUTLIVED * self.mean_tokens)
        return min(expected, max_remaining(request))


def max_remaining(request: Request) -> int:
    """Tokens that it gets at most from now on."""
    return max(0, request.sampling.max_tokens - len(request.output_token_ids))


Growth = Callable[[Sequence[Request], OutputEstimate, int], int]
"""(streams, estimate, block size) -> blocks that they need beyond those they have now."""


def greedy(streams: Sequence[Request], estimate: OutputEstimate, block_size: int) -> int:
    """A block each."""
    return sum(1 for stream in streams if stream.block_table)


def reserve_static(streams: Sequence[Request], estimate: OutputEstimate, block_size: int) -> int:
    """Whatever `max_tokens` allows."""
    return sum(
        max(0, _blocks(s.num_tokens + max_remaining(s), block_size) - _num_held(s, block_size))
        for s in streams
    )


def reserve_dynamic(streams: Sequence[Request], estimate: OutputEstimate, block_size: int) -> int:
    """The most that they are expected to need at any time until the last has ended.

    Need grows until a stream ends and gives its blocks back, so only the ends are looked at.
    """
    ends = sorted((estimate.remaining(s), _num_held(s, block_size)) for s in streams)
    num_freed = num_needed = 0
    for num_ended, (num_tokens, num_held) in enumerate(ends):
        num_left = len(ends) - num_ended
        # Each takes a block within block_size tokens, wherever in its last one it is now.
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
    """Of one pool."""

    def __init__(
        self, block_size: int, name: Headroom = "greedy", num_watermark_blocks: int = 0
    ) -> None:
        """
        Args:
            block_size: in tokens.
            name: which of the three ways.
            num_watermark_blocks: stay free besides, for what was not expected.
        """
        self.estimate = OutputEstimate()
        self._block_size = block_size
        self._growth = _GROWTH[name]
        self._num_watermark_blocks = num_watermark_blocks

    def num_kept_free(self, streams: Sequence[Request], newcomer: Request | None) -> int:
        """Blocks to be left beside the newcomer's own; none if it is alone.

        Args:
            streams: requests that decode here, or will.
            newcomer: to be admitted; None: one that ends without growing.
        """
        if not streams:
            return 0
        grown = [*streams, newcomer] if newcomer is not None else streams
        return self._growth(grown, self.estimate, self._block_size) + self._num_watermark_blocks


def _num_held(request: Request, block_size: int) -> int:
    """Blocks that it has; of a newcomer, those that it is about to be given."""
    return len(request.block_table) or _blocks(request.num_tokens, block_size)


def _blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
