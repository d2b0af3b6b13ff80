"""Tokens and the blocks that hold them: the only arithmetic of the two.

    tokens   0 1 2 3 | 4 5 6 7 | 8 9        block_size 4
    blocks      0         1       2         ten tokens need 3 blocks, and fill 2

Only full blocks have a hash, and can be shared. Layouts and pools have these as methods: ask them
where there is one.
"""

from __future__ import annotations

from typing import NamedTuple


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks these tokens need; the last one may be partly filled."""
    return -(-num_tokens // block_size)


def full_blocks(num_tokens: int, block_size: int) -> int:
    """Return how many blocks these tokens fill."""
    return num_tokens // block_size


def full_tokens(num_tokens: int, block_size: int) -> int:
    """Return how many of these tokens are in blocks that they fill."""
    return num_tokens - num_tokens % block_size


def tokens_in(num_blocks: int, block_size: int) -> int:
    """Return how many tokens these blocks hold."""
    return num_blocks * block_size


def window_block(num_tokens: int, window: int, block_size: int) -> int:
    """Return the first block of which a layer with this window needs KV, to go on from a border.

    The border is the last one before the end of these tokens: where a prefix of them may end.
    """
    border = max(0, num_tokens - 1) // block_size * block_size
    return max(0, border - window + 1) // block_size


def window_tokens(window: int, block_size: int) -> int:
    """Return the most tokens of which a request holds the KV of layers with this window."""
    return (blocks_for(window - 1, block_size) + 1) * block_size


class PerRequest(NamedTuple):
    """What a pool holds of a request, but for whole KV of all its tokens."""

    num_companions: int = 0  # blocks that a block has until windows have passed it
    seen_tokens: int = 0  # as `window_tokens`, of the widest window
    state_tokens: int = 0  # for which the blocks of its state would have room


def held_tokens(num_tokens: float, num_requests: float, each: PerRequest) -> float:
    """Return the tokens whose whole KV takes as much as these requests hold, at most.

    Args:
        num_tokens: of all requests together; at most, whoever has how many.
        num_requests: that they belong to.
        each: of them.
    """
    companions = each.num_companions * min(num_tokens, num_requests * each.seen_tokens)
    of_states = num_requests * each.state_tokens
    return (num_tokens + companions) / (1 + each.num_companions) + of_states


def tokens_of_held(held_tokens: float, num_requests: float, each: PerRequest) -> float:
    """Return how many tokens these requests have at least, given their `held_tokens`."""
    held = max(0.0, held_tokens - num_requests * each.state_tokens)
    companions = each.num_companions * min(held, num_requests * each.seen_tokens)
    return (1 + each.num_companions) * held - companions


def block_range(begin: int, end: int, block_size: int) -> range:
    """Return the blocks in which the tokens [begin, end) are, if there are any."""
    return range(begin // block_size, -(-end // block_size))


def full_range(begin: int, end: int, block_size: int) -> range:
    """Return the blocks that the tokens [begin, end) fill; it may be empty."""
    return range(-(-begin // block_size), end // block_size)
