"""Names for KV blocks by content: a hash chain over token ids.

A block's hash covers its own tokens and, through its parent's hash, every token before them, so
equal hashes mean equal KV. The chain starts at a salt: requests of different salts never share.
The idea is vLLM's automatic prefix caching.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence

HASH_BYTES = 16


def extend_hashes(
    hashes: list[bytes],
    token_slice: Callable[[int, int], Sequence[int]],
    num_tokens: int,
    block_size: int,
    salt: str,
) -> None:
    """Append the hashes of the full blocks of the first `num_tokens` tokens not covered yet.

    `token_slice(start, end)` gives the tokens at these positions; asked only for what is new.
    """
    for index in range(len(hashes), num_tokens // block_size):
        parent = hashes[-1] if hashes else salt.encode()
        tokens = array("q", token_slice(index * block_size, (index + 1) * block_size))
        digest = hashlib.blake2b(tokens.tobytes(), digest_size=HASH_BYTES)
        digest.update(parent)
        hashes.append(digest.digest())


def hash_chain(token_ids: Sequence[int], block_size: int, salt: str) -> list[bytes]:
    """The hashes of the full blocks of `token_ids`."""
    hashes: list[bytes] = []
    extend_hashes(hashes, lambda a, b: token_ids[a:b], len(token_ids), block_size, salt)
    return hashes
