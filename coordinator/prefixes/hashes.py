"""A prompt's block hashes, each computed once, when it is first needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from pdserve.block_hash import iter_hashes


class HashChain:
    """The hashes of a prompt's full blocks of one size, computed lazily."""

    def __init__(self, token_ids: Sequence[int], block_size: int, salt: str) -> None:
        self.num_blocks = len(token_ids) // block_size
        self._known: list[bytes] = []
        self._more: Iterator[bytes] = iter_hashes(token_ids, block_size, salt)

    def known(self, num_blocks: int) -> list[bytes]:
        """Return the hashes of at least the first `num_blocks` blocks (up to `self.num_blocks`)."""
        known = self._known
        if len(known) < num_blocks:
            known.extend(islice(self._more, num_blocks - len(known)))
        return known


class PromptHashes:
    """The hash chains of one prompt, one per block size that members use."""

    def __init__(self, token_ids: Sequence[int], salt: str, *, is_reusable: bool = True) -> None:
        """Without `is_reusable` there are no hashes: the prompt is computed in full."""
        self.num_tokens = len(token_ids)
        self._token_ids = token_ids if is_reusable else ()
        self._salt = salt
        self._chains: dict[int, HashChain] = {}

    def chain(self, block_size: int) -> HashChain:
        """Return the chain for this block size."""
        chain = self._chains.get(block_size)
        if chain is None:
            chain = self._chains[block_size] = HashChain(self._token_ids, block_size, self._salt)
        return chain
