"""The prefix index: which members hold the KV of which prefix, built from the nodes' KV events.

Each block hash has one integer per tier, whose bits are the slots of the members that hold the
block. Since a hash covers all tokens before its block, the longest prefix that a member holds is
found by walking a prompt's hashes in order until no member holds the next one.

Nodes evict a chain from its end, so a member's part of a chain has no gaps. So the walk takes
growing strides, and searches within a stride only if a member dropped out there. If there is a gap
after all, it may be skipped: the result is a hint and can be wrong.
Members with different block sizes have different hashes, and need one walk per block size.

Of a model with states, a request can go on only behind a snapshot of one. Its blocks are cached
under hashes that follow from that of the last block of tokens before it, and told like others. So
what such a member holds ends at its last snapshot, which is looked for from the walk's end back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from coordinator.nodes.registry import Member
from pdserve.kv import need
from pdserve.measured.output_lengths import BEGINNINGS
from pdserve.protocol import KvEvents, KvTier, PrefixSource, Prompt
from pdserve.protocol.requests import HASH_BYTES, state_hashes
from pdserve.shared.errors import MalformedMessage

_EMPTY = Prompt([])


class HashChain:
    """The hashes of a prompt's full blocks of one size, computed lazily."""

    def __init__(self, prompt: Prompt, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = need.full_blocks(prompt.num_tokens, block_size)
        self._known: list[bytes] = []
        self._snapshots: dict[int, bytes] = {}  # by the number of blocks before it
        self._more: Iterator[bytes] = prompt.iter_hashes(block_size)

    def known(self, num_blocks: int) -> list[bytes]:
        """Return the hashes of at least the first `num_blocks` blocks (up to `self.num_blocks`)."""
        known = self._known
        if len(known) < num_blocks:
            known.extend(islice(self._more, num_blocks - len(known)))
        return known

    def snapshot(self, num_blocks: int) -> bytes:
        """Return the hash of the first block of the snapshot behind so many blocks, which is known.

        Computed once: requests in line are looked up again and again.
        """
        found = self._snapshots.get(num_blocks)
        if found is None:
            (found,) = state_hashes(self._known[num_blocks - 1], 1)
            self._snapshots[num_blocks] = found
        return found


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

    @cached_property
    def beginnings(self) -> list[int]:
        """Numbers for its first `BEGINNINGS` tokens, as far as it has them."""
        prompt = self._prompt
        return [hash(prompt.beginning(n)) for n in BEGINNINGS if n <= prompt.num_tokens]


MAX_SOURCES = 3
_MAX_STRIDE = 64  # blocks; hashes beyond the last hit are computed in vain
_FEW_BITS = 12  # up to this many bits are handled one by one
_SOURCES_LOOKED_AT = 32

Ints: TypeAlias = npt.NDArray[np.int64]
_NOWHERE: Ints = np.empty(0, np.int64)
Holders: TypeAlias = Callable[[bytes], int | None]
"""Block hash |-> bits of the members that hold the block; 0 and None: none."""


class Hits(msgspec.Struct, frozen=True):
    """How long a prefix of a prompt members hold; only members that hold any of it."""

    num_tokens: int  # of the prompt
    slots: Ints  # [hits], ascending
    held: Ints  # [hits] prefix tokens held in any tier
    in_pool: Ints  # [hits] prefix tokens held in the KV pool, ready for the engine


@dataclass(slots=True)
class _Holding:
    """The block hashes that one member holds, by tier."""

    member: Member
    bit: int
    hashes: dict[KvTier, set[bytes]] = field(
        default_factory=lambda: {tier: set() for tier in KvTier}
    )


class PrefixIndex:
    """Block hash |-> members, for one coordinator. Memory is proportional to the blocks held."""

    def __init__(self) -> None:
        self._holdings: dict[int, _Holding] = {}  # by slot
        self._num_slots = 0  # 1 + the highest slot ever in use
        self._bits: dict[int, int] = {}  # by block size: bits of the members that use it
        self._with_states = 0  # bits of the members whose requests have states
        # tier |-> hash |-> bits of the members that hold it in that tier
        self._holders: dict[KvTier, dict[bytes, int]] = {tier: {} for tier in KvTier}

    def apply(self, member: Member, events: KvEvents) -> None:
        """Apply a member's message about stored and evicted blocks.

        Raises:
            MalformedMessage: it contains an invalid block hash.
        """
        for block_hash in (*events.stored, *events.evicted):
            if len(block_hash) != HASH_BYTES:
                raise MalformedMessage(
                    f"KvEvents: a block hash has {HASH_BYTES} bytes, not {len(block_hash)}"
                )
        holding = self._holdings.get(member.slot)
        if holding is None:
            holding = self._add(member)
        held, holders, bit = holding.hashes[events.tier], self._holders[events.tier], holding.bit
        for block_hash in events.evicted:
            if block_hash in held:
                held.remove(block_hash)
                _clear(holders, block_hash, bit)
        for block_hash in events.stored:
            held.add(block_hash)
            others = holders.get(block_hash)
            holders[block_hash] = bit if others is None else others | bit  # mostly one int object

    def remove(self, member: Member) -> None:
        """Remove a lost member and all its blocks."""
        holding = self._holdings.get(member.slot)
        if holding is None or holding.member is not member:
            return
        del self._holdings[member.slot]
        self._bits[member.hello.layout.block_size] &= ~holding.bit
        self._with_states &= ~holding.bit
        for tier, hashes in holding.hashes.items():
            for block_hash in hashes:
                _clear(self._holders[tier], block_hash, holding.bit)

    def lookup(self, prompt: PromptHashes) -> Hits:
        """Find how much of this prompt each member holds: with states, up to its last snapshot."""
        pool, host = self._holders[KvTier.POOL], self._holders[KvTier.HOST]
        in_pool = self._leading(prompt, pool.get)
        held = in_pool
        if host:
            held = self._leading(
                prompt, lambda block_hash: pool.get(block_hash, 0) | host.get(block_hash, 0)
            )
        slots = held.nonzero()[0]
        if not len(slots):  # requests keep it
            return Hits(prompt.num_tokens, _NOWHERE, _NOWHERE, _NOWHERE)
        return Hits(prompt.num_tokens, slots, held[slots], in_pool[slots])

    def prefix_sources(self, hits: Hits, puller: Member) -> list[PrefixSource]:
        """Return the members from which `puller` could fetch more of a prompt than it holds itself.

        Longest prefix first.
        """
        if not len(hits.slots):
            return []
        block_size = puller.hello.layout.block_size
        # The last token is always computed: its logits are needed for token 1.
        usable = (hits.num_tokens - 1) // block_size * block_size
        own = hits.held[hits.slots == puller.slot].sum()
        gains = np.minimum(hits.held, usable) // block_size * block_size - own
        gains[hits.slots == puller.slot] = 0
        order = np.lexsort((-hits.in_pool, -gains))[: np.count_nonzero(gains > 0)]
        ready = [
            (index, member)
            for index in order[:_SOURCES_LOOKED_AT].tolist()
            if (member := self._holdings[int(hits.slots[index])].member).exports_kv
            and member.exchanges_kv(puller)
        ]
        # Among equals, prefer KV in the pool (no load from the host tier), then the least queue.
        ready.sort(key=lambda s: (-gains[s[0]], -hits.in_pool[s[0]], s[1].load.queued_tokens))
        return [
            PrefixSource(node=member.address_for(puller), num_tokens=int(hits.held[index]))
            for index, member in ready[:MAX_SOURCES]
        ]

    def _leading(self, prompt: PromptHashes, holders: Holders) -> Ints:
        """Return the prefix tokens that members hold, by slot; `holders` maps a hash to bits."""
        tokens = np.zeros(self._num_slots, np.int64)
        for block_size, bits in self._bits.items():
            if bits:
                chain = prompt.chain(block_size)
                drops = _drops(chain, bits, holders)
                if bits & self._with_states:
                    drops = list(self._at_snapshots(prompt, chain, drops, holders))
                for num_blocks, left in drops:
                    _put(tokens, left, num_blocks * block_size)
        return tokens

    def _at_snapshots(
        self,
        prompt: PromptHashes,
        chain: HashChain,
        drops: list[tuple[int, int]],
        holders: Holders,
    ) -> Iterator[tuple[int, int]]:
        """Yield the same, but members with states drop out at their last snapshot that is of use.

        The last token is always computed, so none at the end of the prompt is.
        """
        most = min(chain.num_blocks, (prompt.num_tokens - 1) // chain.block_size)
        for end, bits in drops:
            yield end, bits & ~self._with_states
            left = bits & self._with_states
            for num_blocks in range(min(end, most), 0, -1):
                if not left:
                    break
                there = left & (holders(chain.snapshot(num_blocks)) or 0)
                yield num_blocks, there
                left ^= there

    def _add(self, member: Member) -> _Holding:
        holding = self._holdings[member.slot] = _Holding(member, 1 << member.slot)
        self._num_slots = max(self._num_slots, member.slot + 1)
        block_size = member.hello.layout.block_size
        self._bits[block_size] = self._bits.get(block_size, 0) | holding.bit
        if member.hello.layout.state_bytes:
            self._with_states |= holding.bit
        return holding


def _drops(chain: HashChain, bits: int, holders: Holders) -> list[tuple[int, int]]:
    """Return where members drop out: (blocks, bits of the members that hold exactly so many)."""
    drops: list[tuple[int, int]] = []
    here, stride = 0, 1  # `bits` hold the first `here` blocks
    while bits and here < chain.num_blocks:
        stop = min(here + stride, chain.num_blocks)
        hashes = chain.known(stop)
        at_stop = bits & (holders(hashes[stop - 1]) or 0)
        while bits != at_stop:
            end, at_end = stop, at_stop  # the first to drop out do so before `end`
            while end - here > 1:
                middle = (here + end) // 2
                at_middle = bits & (holders(hashes[middle - 1]) or 0) | at_stop
                if at_middle == bits:
                    here = middle
                else:
                    end, at_end = middle, at_middle
            drops.append((here, bits ^ at_end))
            here, bits = end, at_end
        here, stride = stop, min(2 * stride, _MAX_STRIDE)
    drops.append((here, bits))
    return drops


def _put(tokens: Ints, bits: int, value: int) -> None:
    """Set `tokens[slot] = value` for the slot of every set bit."""
    if value == 0 or bits == 0:
        return
    if bits.bit_count() <= _FEW_BITS:
        while bits:
            slot = bits.bit_length() - 1
            tokens[slot] = value
            bits ^= 1 << slot
        return
    packed = np.frombuffer(bits.to_bytes(-(-len(tokens) // 8), "little"), np.uint8)
    mask = np.unpackbits(packed, count=len(tokens), bitorder="little")
    tokens[mask.view(np.bool_)] = value


def _clear(holders: dict[bytes, int], block_hash: bytes, bit: int) -> None:
    left = holders[block_hash] & ~bit
    if left:
        holders[block_hash] = left
    else:
        del holders[block_hash]
