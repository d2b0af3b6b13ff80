"""A prompt's block hashes, each computed once and not before somebody asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from pdserve.block_hash import iter_hashes


class HashChain:
    """The hashes of a prompt's full blocks of one size, as far as they have been needed."""

    def __init__(self, token_ids: Sequence[int], block_size: int, salt: str) -> None:
        self.num_blocks = len(token_ids) // block_size
        self._known: list[bytes] = []
        self._more: Iterator[bytes] = iter_hashes(token_ids, block_size, salt)

    def known(self, num_blocks: int) -> list[bytes]:
        """The hashes of so many blocks, of `self.num_blocks` at most, and perhaps of more."""
        known = self._known
        if len(known) < num_blocks:
            known.extend(islice(self._more, num_blocks - len(known)))
        return known


class PromptHashes:
    """One prompt's chains, one for each block size that members have."""

    def __init__(self, token_ids: Sequence[int], salt: str, *, is_reusable: bool = True) -> None:
        """Of a prompt that is computed whatever is cached (not `is_reusable`), there are none."""
        self.num_tokens = len(token_ids)
        self._token_ids = token_ids if is_reusable else ()
        self._salt = salt
        self._chains: dict[int, HashChain] = {}

    def chain(self, block_size: int) -> HashChain:
        """The chain in blocks of this size."""
        chain = self._chains.get(block_size)
        if chain is None:
            chain = self._chains[block_size] = HashChain(self._token_ids, block_size, self._salt)
        return chain
