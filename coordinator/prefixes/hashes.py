"""A prompt's block hashes, each computed once, when it is first needed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from pdserve.kv import need
from pdserve.protocol import Prompt

_EMPTY = Prompt([])


class HashChain:
    """The hashes of a prompt's full blocks of one size, computed lazily."""

    def __init__(self, prompt: Prompt, block_size: int) -> None:
        self.num_blocks = need.full_blocks(prompt.num_tokens, block_size)
        self._known: list[bytes] = []
        self._more: Iterator[bytes] = prompt.iter_hashes(block_size)

    def known(self, num_blocks: int) -> list[bytes]:
        """Return the hashes of at least the first `num_blocks` blocks (up to `self.num_blocks`)."""
        known = self._known
        if len(known) < num_blocks:
            known.extend(islice(self._more, num_blocks - len(known)))
        return known


class PromptHashes:
    """The hash chains of one prompt, one per block size that members use."""

    def __init__(self, prompt: Prompt, *, is_reusable: bool = True) -> None:
        """Without `is_reusable` there are no hashes: the prompt is computed in full."""
        self.num_tokens = prompt.num_tokens
        self._prompt = prompt if is_reusable else _EMPTY
        self._chains: dict[int, HashChain] = {}

    def chain(self, block_size: int) -> HashChain:
        """Return the chain for this block size."""
        chain = self._chains.get(block_size)
        if chain is None:
            chain = self._chains[block_size] = HashChain(self._prompt, block_size)
        return chain
