"""Content hashes of KV blocks: a hash chain over token ids, as in vLLM's prefix caching.

A block's hash covers its own tokens and, through its parent's hash, every token before them, so
equal hashes mean equal KV. The chain starts at a salt: requests with different salts share nothing.
Clients choose salts, so a salt is hashed first. In plain, it could be the hash of some block, and
the prompt's first block would pass for one after that block, whose KV is for other positions.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence

HASH_BYTES = 16
_BLOCKS_PER_PART = 64  # converted to bytes together


def extend_hashes(
    hashes: list[bytes],
    token_slice: Callable[[int, int], Sequence[int]],
    num_tokens: int,
    block_size: int,
    salt: str,
) -> None:
    """Extend `hashes` to all full blocks of the first `num_tokens` tokens.

    `token_slice(start, end)` returns the tokens at these positions; it is called for new ones only.
    """
    num_blocks = num_tokens // block_size
    if num_blocks > len(hashes):
        tokens = token_slice(len(hashes) * block_size, num_blocks * block_size)
        hashes.extend(_chain(hashes[-1] if hashes else _root(salt), tokens, block_size))


def iter_hashes(token_ids: Sequence[int], block_size: int, salt: str) -> Iterator[bytes]:
    """The hashes of the full blocks of `token_ids`, computed lazily."""
    return _chain(_root(salt), token_ids, block_size)


def hash_chain(token_ids: Sequence[int], block_size: int, salt: str) -> list[bytes]:
    """The hashes of the full blocks of `token_ids`."""
    return list(iter_hashes(token_ids, block_size, salt))


def _root(salt: str) -> bytes:
    """What stands in for the parent of a chain's first block."""
    return hashlib.blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"salt").digest()


def _chain(parent: bytes, token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
    """The hashes of the full blocks of `token_ids`, which follow the block `parent`."""
    block_bytes = block_size * 8
    stride = block_size * _BLOCKS_PER_PART
    for first in range(0, len(token_ids), stride):
        tokens = memoryview(array("q", token_ids[first : first + stride])).cast("B")
        for end in range(block_bytes, len(tokens) + 1, block_bytes):
            digest = hashlib.blake2b(tokens[end - block_bytes : end], digest_size=HASH_BYTES)
            digest.update(parent)
            parent = digest.digest()
            yield parent
