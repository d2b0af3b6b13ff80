"""A request: its prompt, its sampling parameters, and what it was promised.

A `Prompt` is all that decides a request's KV, as one value. The hashes are a chain over token ids,
as in vLLM's prefix caching: a block's hash covers its own tokens and, through its parent's hash,
every token before them, so equal hashes mean equal KV. The chain begins at the prompt's root, so
prompts of different roots share nothing. What else comes to decide KV becomes a field of `Prompt`:
part of its root if it is about all positions, as most adapters are, or hashed at the positions that
it is about, as an aLoRA is, which computes a prompt from its invocation on.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum

from msgspec import structs

from pdserve.protocol.message import Inline, Message
from pdserve.shared.pooling import Pooling

HASH_BYTES = 16
_BLOCKS_PER_PART = 64  # converted to bytes together
_MOST_DIGITS = 4  # of the length of an owner's name in a salt


class Prompt(Inline, frozen=True):
    """Tokens to compute KV for, and whose KV they may share."""

    token_ids: list[int]
    cache_salt: str = ""  # prompts share cached prefixes only with prompts of the same salt
    # The request may outgrow the model's first context length, and has the rotary embedding for
    # that from its first token on (`engine/models/rope_config.py`). False: all requests have one.
    is_long: bool = False
    adapter: str = ""  # digest of the adapter that computes it (`engine/adapters`); "": none does
    adapted_from: int = 0  # the first position that it computes, in the prompt; 0 without one

    @property
    def root(self) -> bytes:
        """What stands in for the parent of its first block.

        Clients choose salts, so a salt is hashed. In plain, it could be the hash of some block, and
        the first block here would pass for one after that block, whose KV is for other positions.
        """
        salt, person = self.cache_salt.encode(), b"salt, long" if self.is_long else b"salt"
        # A key cannot be part of a salt. Positions before an adapter are the model's own.
        key = b"" if self.adapted_from else self.adapter.encode()
        return hashlib.blake2b(salt, digest_size=HASH_BYTES, person=person, key=key).digest()

    @property
    def owner(self) -> str:
        """The tenant, or group of tenants, that its salt names; empty: nobody.

        Of a cluster without keys it is what its caller says.
        """
        digits, _, rest = self.cache_salt.partition(":")
        if not digits.isdecimal() or len(digits) > _MOST_DIGITS:
            return ""
        owner, end = rest[: int(digits)], rest[int(digits) :]
        return owner if end.startswith(":") else ""

    @property
    def num_tokens(self) -> int:
        """Its length."""
        return len(self.token_ids)

    def then(self, token_ids: list[int]) -> Prompt:
        """Return the prompt that goes on with these tokens; itself if there are none."""
        return structs.replace(self, token_ids=self.token_ids + token_ids) if token_ids else self

    def beginning(self, num_tokens: int) -> bytes:
        """Return bytes that are equal for prompts whose first tokens have the same KV."""
        kind = b"long " if self.is_long else b""
        if self.adapted_from:
            if self.adapted_from < num_tokens:
                kind += b"\xff" + self._turn + b" "
        elif self.adapter:  # others keep their bytes, by which coordinators of both kinds agree
            kind += b"\xff" + self.adapter.encode() + b" "  # no text has this byte, so no salt
        return array("q", self.token_ids[:num_tokens]).tobytes() + kind + self.cache_salt.encode()

    def hashes(self, block_size: int) -> list[bytes]:
        """Return the hashes of its full blocks."""
        return list(self.iter_hashes(block_size))

    def iter_hashes(self, block_size: int) -> Iterator[bytes]:
        """Yield the hashes of its full blocks, each computed when it is asked for."""
        return self._chain([], self.token_ids, block_size)

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
            hashes.extend(self._chain(hashes, tokens, block_size))

    def _chain(
        self, hashes: list[bytes], token_ids: Sequence[int], block_size: int
    ) -> Iterator[bytes]:
        """The hashes of the full blocks of `token_ids`, which follow those of `hashes`."""
        parent = hashes[-1] if hashes else self.root
        num_before = self.adapted_from // block_size - len(hashes)  # an adapter begins in the next
        if not self.adapted_from or num_before < 0:
            yield from _chain(parent, token_ids, block_size)
            return
        for own in _chain(parent, token_ids[: num_before * block_size], block_size):
            parent = own
            yield own
        rest = token_ids[num_before * block_size :]
        yield from _chain(_turned(parent, self._turn), rest, block_size)

    @property
    def _turn(self) -> bytes:
        """Which adapter computes it from where on."""
        return f"{self.adapter} from {self.adapted_from}".encode()


def is_long(num_tokens: int, short_len: int) -> bool:
    """Whether a request is a long one (`Prompt.is_long`).

    Args:
        num_tokens: that it may get: its prompt's and max_tokens.
        short_len: of the model (`NodeHello`).
    """
    return 0 < short_len < num_tokens


def state_hashes(block_hash: bytes, num_blocks: int) -> list[bytes]:
    """Return hashes of the blocks of the state behind the block of tokens that has this hash."""
    return [
        hashlib.blake2b(
            block_hash + number.to_bytes(8), digest_size=HASH_BYTES, person=b"state"
        ).digest()
        for number in range(num_blocks)
    ]


def _turned(parent: bytes, turn: bytes) -> bytes:
    """What stands in for the parent of the block in which an adapter begins."""
    return hashlib.blake2b(parent, digest_size=HASH_BYTES, person=b"turn", key=turn).digest()


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


class FinishReason(IntEnum):
    """Why the output ended. The coordinator translates this into OpenAI's finish reasons."""

    STOP = 1  # an eos or stop token, or a stop string
    LENGTH = 2


class BadWord(Message, frozen=True):
    """One tokenisation of a text that must not appear in the output."""

    token_ids: list[int]  # at least one


class SamplingParams(Message, frozen=True):
    """How tokens are chosen. Sampling is a pure function of these, the logits and the history.

    The defaults are off or neutral.
    """

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] = []  # the only tokens that may be sampled; empty: all
    bad_words: list[BadWord] = []
    seed: int = 0  # always set: the coordinator draws one if the client gives none
    max_tokens: int = 16  # 0: only the prompt is computed, nothing is sampled
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    logprobs: int | None = None  # None: none; n: of the chosen token and the n likeliest ones
    logprob_token_ids: list[int] = []  # with `logprobs`: listed instead of the n likeliest ones
    grammar: str = ""  # that the output must match (pdserve/grammar); empty: none
    prompt_logprobs: int | None = None  # as `logprobs`, for the prompt's tokens
    pooling: Pooling | None = None  # for an embedding of the prompt, with max_tokens 0; None: none

    @property
    def reuses_prefix(self) -> bool:
        """Whether cached KV can be used: scores and states of cached tokens are not available."""
        return self.prompt_logprobs is None and self.pooling in (None, Pooling.LAST)

    @property
    def wants_prompt_results(self) -> bool:
        """Whether more than KV is wanted of the prompt."""
        return self.prompt_logprobs is not None or self.pooling is not None

    @property
    def follows_tokens(self) -> bool:
        """Whether what may come next depends on the tokens so far, beyond how many they are.

        If not, the host can say what a draw needs before it knows the token before it.
        """
        return (
            bool(self.grammar)
            or self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or any(len(word.token_ids) > 1 for word in self.bad_words)
        )


class TokenLogprobs(Message, frozen=True):
    """Log-probabilities at one position, from the model's distribution before any filter."""

    chosen: float
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    rank: int = 0  # of the chosen token, from 1; 0: not computed (it is for prompts only)


class Slo(Message, frozen=True):
    """What a request was promised. Times are what remains of them when the leg is sent.

    They are durations, because the clocks of two machines differ. 0: not promised.
    """

    name: str = ""  # service class
    tenant: str = ""  # empty: none
    priority: int = 0  # higher goes first, and preempts lower
    weight: float = 1.0  # of its payer
    ttft_s: float = 0.0  # until token 1 is due; negative: overdue
    tpot_s: float = 0.0  # per token after token 1
    hold_s: float = 0.0  # for which token 1 may still be held back; negative: no longer
    deadline_s: float = 0.0  # until the request expires

    @property
    def payer(self) -> str:
        """Whose share the request counts against: payers of equal priority share by weight.

        A tenant is one payer, whichever classes it names.
        """
        return f"tenant {self.tenant}" if self.tenant else self.name
