"""Tickets: they name the KV of a token range in an exporter's pool.

A sealed ticket is a msgpack body and a MAC under a key that only the exporter's node has. The
exporter verifies its own tickets. A puller reads the body, which it got over its session with the
exporter, but cannot verify it. So it checks the ids against the pool's size, and the generations
tell whether the data that it has read is what the ticket names.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from kv_transfer.spans.box import KvBox
from pdserve.kv import KvLayout, need
from pdserve.shared.clock import Clock
from pdserve.shared.errors import StaleIncarnation, TicketInvalid

MAX_TICKET_BYTES = 2 << 20  # see `max_blocks`
MAC_BYTES = 32
_OTHER_BYTES = 8 << 10  # more than all fields together that are no lists
_NUMBER_BYTES = 9  # in msgpack, at most

_Name = Annotated[str, Meta(max_length=256)]
_Count = Annotated[int, Meta(ge=0, le=1 << 40)]
_BlockId = Annotated[int, Meta(ge=0, lt=1 << 40)]
_Generation = Annotated[int, Meta(ge=0)]  # msgpack has no integer of more than 64 bits
_Checksum = Annotated[int, Meta(ge=0)]
_SUM_BYTES = 8


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The KV of tokens [first_token, first_token + num_tokens) of one request, in some layers.

    `block_ids` are the blocks that hold these tokens: the first one holds `first_token`, and the
    last one the last token. In pools with companions, the first companions of all these follow, and
    so on; in place of one that has been given back, its block is named again. `generations` has one
    entry per block.
    """

    version: Literal[2, 3]
    node_id: _Name
    incarnation: _Name
    request_id: _Name
    fingerprint: _Name
    first_token: _Count
    num_tokens: _Count
    block_ids: list[_BlockId]
    generations: list[_Generation]
    first_layer: _Count
    end_layer: _Count
    # One per block, KV head and group of layers, each 8 bytes (kv_transfer/checksum.py), or none.
    # Builds that make version 2 have others, in a list.
    checksums: bytes | list[_Checksum]
    expires_at_s: float  # on the exporter's clock

    @property
    def end_token(self) -> int:
        """One past the last token."""
        return self.first_token + self.num_tokens

    @property
    def sums(self) -> bytes:
        """The checksums, if there are any that we understand."""
        return self.checksums if isinstance(self.checksums, bytes) else b""

    def first_block(self, block_size: int) -> int:
        """Index of `block_ids[0]` among the request's blocks."""
        return need.full_blocks(self.first_token, block_size)

    def blocks_between(
        self, begin: int, end: int, block_size: int, which: int = 0
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """(block ids, generations) of the blocks that hold tokens [begin, end).

        `which`: 0 for the first ones, n for their companions n - 1.
        """
        origin = self.first_block(block_size)
        if which:
            origin -= which * self._num_first(block_size)
        blocks = need.block_range(begin, end, block_size)
        part = slice(blocks.start - origin, blocks.stop - origin)
        return (
            np.array(self.block_ids[part], dtype=np.int64),
            np.array(self.generations[part], dtype=np.uint64),
        )

    def kept_from(self, block_size: int, which: int) -> int:
        """The first token from which on all companions of a kind are there; the end, if none is."""
        count = self._num_first(block_size)
        companions = self.block_ids[which * count : (which + 1) * count]
        gone = [n for n in range(count) if companions[n] == self.block_ids[n]]
        if not gone:
            return self.first_token
        kept_block = self.first_block(block_size) + gone[-1] + 1
        return min(need.tokens_in(kept_block, block_size), self.end_token)

    def _num_first(self, block_size: int) -> int:
        first = need.full_blocks(self.first_token, block_size)
        return need.blocks_for(self.first_token + self.num_tokens, block_size) - first

    def check_covers(self, box: KvBox, layout: KvLayout) -> None:
        """Check that a requested box is not empty, and that the ticket covers it.

        Raises:
            TicketInvalid: it does not.
        """
        if (
            box.is_empty
            or box.begin < self.first_token
            or box.end > self.end_token
            or box.first_layer < max(self.first_layer, layout.first_layer)
            or box.end_layer > min(self.end_layer, layout.end_layer)
            or box.first_head < layout.heads.start
            or box.end_head > layout.heads.stop
        ):
            raise TicketInvalid(
                f"{box} is not in the ticket's tokens {self.first_token}..{self.end_token}, "
                f"layers {self.first_layer}..{self.end_layer}, heads "
                f"{layout.heads.start}..{layout.heads.stop}"
            )

    def check(self, num_blocks: int, layout: KvLayout) -> None:
        """Check that the fields are consistent, and fit a pool of `num_blocks` blocks.

        Raises:
            TicketInvalid: they do not.
        """
        block_size = layout.block_size
        num_first = self._num_first(block_size)
        expected = num_first * (1 + layout.num_companions)
        if self.num_tokens == 0 or not len(self.block_ids) == len(self.generations) == expected:
            raise TicketInvalid(
                f"tokens {self.first_token}..{self.end_token} take {expected} blocks of "
                f"{block_size}, the ticket has {len(self.block_ids)} with "
                f"{len(self.generations)} generations"
            )
        if max(self.block_ids) >= num_blocks:
            raise TicketInvalid(
                f"block id {max(self.block_ids)} is out of range for a pool of {num_blocks} blocks"
            )
        if not self.first_layer < self.end_layer <= layout.num_layers:
            raise TicketInvalid(
                f"layers {self.first_layer}..{self.end_layer} are not some of {layout.num_layers}"
            )
        if len(self.sums) % (_SUM_BYTES * num_first * len(layout.heads)):
            raise TicketInvalid(
                f"{len(self.sums)} bytes of checksums do not fit {num_first} blocks of "
                f"{len(layout.heads)} KV heads"
            )


def max_blocks(num_checksums: int) -> int:
    """The most blocks that a ticket has room for in any case, with so many checksums for each."""
    block_bytes = 2 * _NUMBER_BYTES + _SUM_BYTES * num_checksums
    return (MAX_TICKET_BYTES - _OTHER_BYTES) // block_bytes


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Ticket)


class TicketSealer:
    """Seals and verifies the tickets of one incarnation of an exporter."""

    def __init__(self, incarnation: str, clock: Clock, key: bytes = b"") -> None:
        """`key`: of the exporter on another host of the node; empty: a new one."""
        self._incarnation = incarnation
        self._clock = clock
        self.key = key or secrets.token_bytes(32)

    def seal(self, ticket: Ticket) -> bytes:
        """Encode a ticket and append its MAC.

        Raises:
            ValueError: more than MAX_TICKET_BYTES; up to `max_blocks` are always fewer.
        """
        body = _ENCODER.encode(ticket)
        if len(body) + MAC_BYTES > MAX_TICKET_BYTES:
            raise ValueError(
                f"a ticket for {len(ticket.block_ids)} blocks has {len(body) + MAC_BYTES} bytes, "
                f"more than {MAX_TICKET_BYTES}"
            )
        return body + self._mac(body)

    def open(self, sealed: bytes) -> Ticket:
        """Decode and verify a ticket.

        Raises:
            TicketInvalid: oversized, malformed, forged or expired.
            StaleIncarnation: made by an earlier incarnation of this exporter.
        """
        ticket = read_ticket(sealed)
        if ticket.incarnation != self._incarnation:
            raise StaleIncarnation(
                f"the ticket was issued by {ticket.node_id!r} in incarnation "
                f"{ticket.incarnation!r}, this is {self._incarnation!r}"
            )
        if not hmac.compare_digest(sealed[-MAC_BYTES:], self._mac(sealed[:-MAC_BYTES])):
            raise TicketInvalid("the ticket's seal does not fit its contents")
        overdue_s = self._clock.now() - ticket.expires_at_s
        if not overdue_s <= 0:
            raise TicketInvalid(f"the ticket expired {overdue_s:.1f} s ago")
        return ticket

    def _mac(self, body: bytes) -> bytes:
        return hashlib.blake2b(body, digest_size=MAC_BYTES, key=self.key).digest()


def read_ticket(sealed: bytes) -> Ticket:
    """Decode a ticket without verifying it.

    Raises:
        TicketInvalid: oversized or malformed.
    """
    if not MAC_BYTES < len(sealed) <= MAX_TICKET_BYTES:
        raise TicketInvalid(
            f"a ticket has {MAC_BYTES + 1}..{MAX_TICKET_BYTES} bytes, this has {len(sealed)}"
        )
    try:
        return _DECODER.decode(memoryview(sealed)[:-MAC_BYTES])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TicketInvalid(f"the ticket is garbled: {error}") from error
