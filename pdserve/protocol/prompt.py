"""A prompt: all that decides a request's KV, as one value; and the hashes of its blocks.

The hashes are a chain over token ids, as in vLLM's prefix caching: a block's hash covers its own
tokens and, through its parent's hash, every token before them, so equal hashes mean equal KV. The
chain begins at the prompt's root, so prompts of different roots share nothing. What else comes to
decide KV becomes a field of `Prompt`: part of its root if it is about all positions, as an adapter
is, or hashed at the positions that it is about, as an image is.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence

from pdserve.protocol.message import Inline

HASH_BYTES = 16
_BLOCKS_PER_PART = 64  # converted to bytes together


class Prompt(Inline, frozen=True):
    """Tokens to compute KV for, and whose KV they may share."""

    token_ids: list[int]
    cache_salt: str = ""  # prompts share cached prefixes only with prompts of the same salt

    @property
    def root(self) -> bytes:
        """What stands in for the parent of its first block.

        Clients choose salts, so a salt is hashed. In plain, it could be the hash of some block, and
        the first block here would pass for one after that block, whose KV is for other positions.
        """
        salt = self.cache_salt.encode()
        return hashlib.blake2b(salt, digest_size=HASH_BYTES, person=b"salt").digest()

    @property
    def num_tokens(self) -> int:
        """Its length."""
        return len(self.token_ids)

    def then(self, token_ids: list[int]) -> Prompt:
        """Return the prompt that goes on with these tokens; itself if there are none."""
        return Prompt(self.token_ids + token_ids, self.cache_salt) if token_ids else self

    def beginning(self, num_tokens: int) -> bytes:
        """Return bytes that are equal for prompts whose first tokens have the same KV."""
        return array("q", self.token_ids[:num_tokens]).tobytes() + self.cache_salt.encode()

    def hashes(self, block_size: int) -> list[bytes]:
        """Return the hashes of its full blocks."""
        return list(self.iter_hashes(block_size))

    def iter_hashes(self, block_size: int) -> Iterator[bytes]:
        """Yield the hashes of its full blocks, each computed when it is asked for."""
        return _chain(self.root, self.token_ids, block_size)

    def extend_hashes(
        self,
        hashes: list[bytes],
        token_slice: Callable[[int, int], Sequence[int]],
        num_tokens: int,
        block_size: int,
    ) -> None:
        """Extend `hashes` to all full blocks of the first `num_tokens` tokens.

        They are this prompt's and those of its answer. `token_slice(start, end)` returns the tokens
        at these positions; it is called for new ones only.
        """
        num_blocks = num_tokens // block_size
        if num_blocks > len(hashes):
            tokens = token_slice(len(hashes) * block_size, num_blocks * block_size)
            hashes.extend(_chain(hashes[-1] if hashes else self.root, tokens, block_size))


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
