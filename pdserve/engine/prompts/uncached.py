"""How much of a prompt would have to be computed if it were started now."""

from __future__ import annotations

from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request


def num_uncached(request: Request, pool: BlockPool) -> int:
    """Return the number of tokens that are neither computed nor in the pool's prefix cache.

    This is called for every waiting prompt at every step, so the last match is kept and extended
    from its end, because hash chains are evicted from their ends. A gap further in would not be
    noticed, and the result would be too low until the end is evicted too. Admission matches again
    from the start.
    """
    if request.block_table:
        return request.num_uncomputed_tokens
    block_size = pool.block_size
    if request.matched_version != pool.cache_version:
        request.extend_hashes(request.num_tokens, block_size)
        hashes, num_matched = request.block_hashes, request.num_matched_blocks
        num_reusable = request.num_reusable_tokens // block_size
        if num_matched and hashes[num_matched - 1] not in pool:
            num_matched = 0
        while num_matched < num_reusable and hashes[num_matched] in pool:
            num_matched += 1
        request.num_matched_blocks = num_matched
        request.matched_version = pool.cache_version
    return request.num_tokens - request.num_matched_blocks * block_size
