"""How much of a prompt would have to be computed if it were begun now."""

from __future__ import annotations

from pdserve.engine.block_pool import BlockPool
from pdserve.engine.request import Request


def num_uncached(request: Request, pool: BlockPool) -> int:
    """Tokens of a request that are neither computed nor in the pool's prefix cache.

    Asked for every waiting prompt at every step, so the match is kept and moved on from its end:
    chains are evicted from their ends. A hole further in would go unseen, and make this too low
    until the end is evicted too; admission matches anew.
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
