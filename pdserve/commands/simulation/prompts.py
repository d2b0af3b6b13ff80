"""Prompts of which only lengths and shared prefixes are known, as in published traces.

They stand for token ids that nobody needs: their block hashes are made of numbers instead. Equal
hashes mean equal prefixes, as with real ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast, overload

from coordinator.prefixes.index import HashChain, PromptHashes
from pdserve.commands.simulation.call import Call
from pdserve.engine.request import Request
from pdserve.kv import need
from pdserve.lifecycle import Lifecycle, Targets
from pdserve.measured.output_lengths import BEGINNINGS
from pdserve.protocol import Prompt, SamplingParams
from pdserve.protocol.requests import HASH_BYTES

STOP_TOKEN = -1  # no prompt has it
_NO_TOKENS = Prompt([])
_OWN = 1 << 62  # added to the number of a prompt, so that it is no trace's block id


class KnownPrompt(Sequence[int]):
    """A prompt by its length, and by the ids of its blocks if it shares any with others.

    An id stands for the block and everything before it.
    """

    __slots__ = ("_block_tokens", "_blocks", "_hashes", "_num_tokens", "number")

    def __init__(
        self, number: int, num_tokens: int, blocks: Sequence[int] = (), block_tokens: int = 1
    ) -> None:
        """
        Args:
            number: unique among the prompts of a simulation.
            num_tokens: its length.
            blocks: ids of its first blocks; nobody shares the others.
            block_tokens: tokens of such a block; the last one may be shorter.
        """
        self.number = number
        self._num_tokens = num_tokens
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._hashes: tuple[int, list[bytes]] = (0, [])  # of the last block size asked for

    def __len__(self) -> int:
        return self._num_tokens

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        """Return made-up tokens: equal where prompts share a block."""
        if isinstance(index, slice):
            return [self._id_at(at) for at in range(*index.indices(self._num_tokens))]
        return self._id_at(range(self._num_tokens)[index])

    @property
    def as_prompt(self) -> Prompt:
        """This in place of the tokens of a prompt."""
        return Prompt(cast("list[int]", self))

    def hashes(self, block_size: int) -> list[bytes]:
        """Return the hashes of the full blocks of this size."""
        if self._hashes[0] != block_size:
            ends = range(block_size - 1, self._num_tokens, block_size)
            own = _OWN + self.number << 32
            num_known = need.full_blocks(len(self._blocks) * self._block_tokens, block_size)
            numbers = [self._id_at(end) << 32 | end for end in ends[:num_known]]
            numbers += [own | end for end in ends[num_known:]]
            self._hashes = block_size, [number.to_bytes(HASH_BYTES) for number in numbers]
        return self._hashes[1]

    def output_hash(self, index: int) -> bytes:
        """Return the hash of a block with tokens of the answer, which nobody shares."""
        return (_OWN + self.number << 32 | 1 << 31 | index).to_bytes(HASH_BYTES)

    def beginning(self, num_tokens: int) -> int:
        """Return a number that prompts have in common if they share these tokens."""
        return hash((num_tokens, self._id_at(num_tokens - 1)))

    def _id_at(self, index: int) -> int:
        place = index // self._block_tokens
        return self._blocks[place] if place < len(self._blocks) else _OWN + self.number


@dataclass(slots=True, eq=False)
class KnownRequest(Request):
    """A request for a known prompt; no tokens are hashed."""

    known: KnownPrompt = field(kw_only=True)

    def extend_hashes(self, num_tokens: int, block_size: int) -> None:
        """As Request.extend_hashes."""
        hashes, num_blocks = self.block_hashes, need.full_blocks(num_tokens, block_size)
        if num_blocks > len(hashes):
            hashes.extend(self.known.hashes(block_size)[len(hashes) : num_blocks])
            output_hash = self.known.output_hash
            hashes.extend([output_hash(index) for index in range(len(hashes), num_blocks)])


class KnownHashes(PromptHashes):
    """The hashes of a known prompt, as the router asks for them."""

    def __init__(self, prompt: KnownPrompt) -> None:
        super().__init__(_NO_TOKENS)
        self.num_tokens = len(prompt)
        self._known = prompt

    def chain(self, block_size: int) -> HashChain:
        """As PromptHashes.chain."""
        return _KnownChain(self._known.hashes(block_size), block_size)

    @cached_property
    def beginnings(self) -> list[int]:
        """As PromptHashes.beginnings."""
        known = self._known
        return [known.beginning(n) for n in BEGINNINGS if n <= len(known)]


class _KnownChain(HashChain):
    def __init__(self, hashes: list[bytes], block_size: int) -> None:
        super().__init__(_NO_TOKENS, block_size)
        self.num_blocks = len(hashes)
        self._known = hashes


def hashes_of(call: Call) -> PromptHashes:
    """Return the hashes of a call's prompt, as the router asks for them."""
    known = _known(call)
    return PromptHashes(call.prompt) if known is None else KnownHashes(known)


def request_of(
    call: Call, targets: Targets, now_s: float, leg_token_limit: int | None = None
) -> Request:
    """Return the engine's request for a call; `leg_token_limit` is 1 for a prefill leg."""
    known = _known(call)
    sampling = SamplingParams(
        max_tokens=call.max_tokens, stop_token_ids=[STOP_TOKEN], ignore_eos=call.is_exact
    )
    lifecycle = Lifecycle(received_s=now_s)
    if known is not None:
        return KnownRequest(
            request_id=call.call_id,
            prompt=Prompt(cast("list[int]", range(len(known)))),  # only its length counts
            sampling=sampling,
            lifecycle=lifecycle,
            leg_token_limit=leg_token_limit,
            targets=targets,
            known=known,
        )
    return Request(
        request_id=call.call_id,
        prompt=call.prompt,
        sampling=sampling,
        lifecycle=lifecycle,
        leg_token_limit=leg_token_limit,
        targets=targets,
    )


def _known(call: Call) -> KnownPrompt | None:
    """The known prompt of a call; None: it has tokens."""
    tokens: object = call.prompt.token_ids
    return tokens if isinstance(tokens, KnownPrompt) else None
