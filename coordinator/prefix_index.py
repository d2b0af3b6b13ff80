"""Which member holds the KV of which prefix: an index over the nodes' KV events.

Each block hash has one integer per tier, whose bits are the members that hold the block. Since a
hash covers everything before its block, the longest prefix that a member holds is found by walking
a prompt's hashes in order; the walk ends at the first block that nobody holds any more, and
computes no hash beyond it. Members with different block sizes have different hashes: one walk each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from coordinator.registry import Member
from pdserve.block_hash import HASH_BYTES, iter_hashes
from pdserve.errors import MalformedMessage
from pdserve.protocol import KvEvents, KvTier, PrefixSource

MAX_SOURCES = 3


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """How much of a prompt a member holds, from its first token on."""

    num_tokens: int  # whichever tier they are in
    num_pool_tokens: int  # of these, from the first on: in the pool, ready for the engine


@dataclass(slots=True)
class _Holding:
    """What one member holds."""

    bit: int
    hashes: dict[KvTier, set[bytes]] = field(
        default_factory=lambda: {tier: set() for tier in KvTier}
    )


class PrefixIndex:
    """Hash |-> members, for one coordinator. Memory is in proportion to what members hold."""

    def __init__(self) -> None:
        self._holdings: dict[Member, _Holding] = {}
        # hash |-> bits of the members that hold it there
        self._holders: dict[KvTier, dict[bytes, int]] = {tier: {} for tier in KvTier}

    def apply(self, member: Member, events: KvEvents) -> None:
        """A member has said what it holds now, and what not any more.

        Raises:
            MalformedMessage: something in it is no block hash.
        """
        for block_hash in (*events.stored, *events.evicted):
            if len(block_hash) != HASH_BYTES:
                raise MalformedMessage(f"a block hash of {len(block_hash)} bytes")
        holding = self._holdings.get(member)
        if holding is None:
            holding = self._holdings[member] = _Holding(self._free_bit())
        held, holders = holding.hashes[events.tier], self._holders[events.tier]
        for block_hash in events.evicted:
            if block_hash in held:
                held.remove(block_hash)
                _clear(holders, block_hash, holding.bit)
        for block_hash in events.stored:
            held.add(block_hash)
            holders[block_hash] = holders.get(block_hash, 0) | holding.bit

    def remove(self, member: Member) -> None:
        """The member is gone, and everything it held."""
        holding = self._holdings.pop(member, None)
        if holding is None:
            return
        for tier, hashes in holding.hashes.items():
            for block_hash in hashes:
                _clear(self._holders[tier], block_hash, holding.bit)

    def longest_prefixes(
        self, token_ids: Sequence[int], cache_salt: str
    ) -> dict[Member, HeldPrefix]:
        """How much of this prompt each member holds; those that hold nothing of it are left out."""
        by_size: dict[int, list[Member]] = {}
        for member in self._holdings:
            by_size.setdefault(member.hello.layout.block_size, []).append(member)
        found: dict[Member, HeldPrefix] = {}
        for block_size, members in by_size.items():
            chain = iter_hashes(token_ids, block_size, cache_salt)
            any_blocks, pool_blocks = self._walk(chain, members)
            for member in members:
                bit = self._holdings[member].bit
                if any_blocks[bit]:
                    found[member] = HeldPrefix(
                        any_blocks[bit] * block_size, pool_blocks[bit] * block_size
                    )
        return found

    def _walk(
        self, chain: Iterable[bytes], members: Sequence[Member]
    ) -> tuple[dict[int, int], dict[int, int]]:
        """(leading blocks held in any tier, leading blocks held in the pool), by member bit."""
        pool, host = self._holders[KvTier.POOL], self._holders[KvTier.HOST]
        in_any = in_pool = sum(self._holdings[member].bit for member in members)
        any_blocks: dict[int, int] = {}
        pool_blocks: dict[int, int] = {}
        num_blocks = 0
        for block_hash in chain:
            in_this_pool = pool.get(block_hash, 0)
            in_this = in_this_pool | host.get(block_hash, 0)
            if gone := in_pool & ~in_this_pool:
                pool_blocks.update(dict.fromkeys(_bits(gone), num_blocks))
                in_pool &= in_this_pool
            if gone := in_any & ~in_this:
                any_blocks.update(dict.fromkeys(_bits(gone), num_blocks))
                in_any &= in_this
                if not in_any:
                    break
            num_blocks += 1
        any_blocks.update(dict.fromkeys(_bits(in_any), num_blocks))
        pool_blocks.update(dict.fromkeys(_bits(in_pool), num_blocks))
        return any_blocks, pool_blocks

    def _free_bit(self) -> int:
        taken = sum(holding.bit for holding in self._holdings.values())
        return ~taken & (taken + 1)  # the lowest bit that is not set


def prefix_sources(
    held: dict[Member, HeldPrefix], puller: Member, num_prompt_tokens: int
) -> list[PrefixSource]:
    """Whom `puller` could ask for more of a prompt than it holds itself; longest first."""
    block_size = puller.hello.layout.block_size
    # The last token is always computed: without its logits there is no next one.
    usable = (num_prompt_tokens - 1) // block_size * block_size
    own = held[puller].num_tokens if puller in held else 0

    def gain(member: Member) -> int:
        return min(held[member].num_tokens, usable) // block_size * block_size - own

    better = [m for m in held if m is not puller and m.is_ready and gain(m) > 0]
    # Of equals, the one that need not load it first, and then the one with the least to do.
    better.sort(key=lambda m: (-gain(m), -held[m].num_pool_tokens, m.load.queued_tokens))
    return [
        PrefixSource(node=m.address_for(puller), num_tokens=held[m].num_tokens)
        for m in better[:MAX_SOURCES]
    ]


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


def _clear(holders: dict[bytes, int], block_hash: bytes, bit: int) -> None:
    left = holders[block_hash] & ~bit
    if left:
        holders[block_hash] = left
    else:
        del holders[block_hash]
