"""Names for KV blocks by content: a hash chain over token ids.

A block's hash covers its own tokens and, through its parent's hash, every token before them, so
equal hashes mean equal KV. The chain starts at a salt: requests of different salts never share.
The idea is vLLM's automatic prefix caching.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

HASH_BYTES = 16


def extend_hashes(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, salt: str
) -> None:
    """Append the hashes of the full blocks of `token_ids` that `hashes` does not cover yet."""
    for index in range(len(hashes), len(token_ids) // block_size):
        parent = hashes[-1] if hashes else salt.encode()
        tokens = array("q", token_ids[index * block_size : (index + 1) * block_size])
        digest = hashlib.blake2b(tokens.tobytes(), digest_size=HASH_BYTES)
        digest.update(parent)
        hashes.append(digest.digest())
