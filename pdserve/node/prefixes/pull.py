"""Pulls blocks of a prefix from another node: the query, its answer, and the pull."""

from __future__ import annotations

from kv_transfer.ticket import read_ticket
from pdserve.kv import KvLayout
from pdserve.node.prefixes.cost import PrefixWorth
from pdserve.node.prefixes.exports import MAX_HASHES
from pdserve.node.prefixes.headroom import Filling
from pdserve.node.prefixes.offers import FetchParts, Prefix
from pdserve.node.sessions.session import Session
from pdserve.protocol import PrefixAnswer, PrefixSource
from pdserve.shared.errors import MalformedMessage, OutOfBlocks, StaleTicket


class SourcePuller:
    """Pulls prefix blocks from any source into one pool."""

    def __init__(
        self, parts: FetchParts, filling: Filling, worth: PrefixWorth, timeout_s: float
    ) -> None:
        self._parts = parts
        self._pool = parts.pool
        self._layout = parts.identity.layout
        self._filling = filling
        self._worth = worth
        self._timeout_s = timeout_s

    async def extend(self, source: PrefixSource, prefix: Prefix, block_ids: list[int]) -> int:
        """Pull the source's next blocks, publish them, and append them to `block_ids`.

        Returns how many blocks were appended.

        Raises:
            OutOfBlocks: there is no room here.
            PdserveError: the source is lost, has none of them any more, or its answer is invalid.
        """
        layout = self._layout
        session = await self._parts.sessions.get(source.node)
        theirs = session.link.welcome.layout
        started_s = self._parts.clock.now()
        num_here = len(block_ids)
        num_wanted = self._filling.room(prefix.num_offered(source, layout.block_size) - num_here)
        first_block = theirs.full_blocks(layout.tokens_in(num_here))
        end_token = layout.tokens_in(num_here + num_wanted)
        end_block = min(theirs.blocks_for(end_token), first_block + MAX_HASHES)
        hashes = self._hashes_for(prefix, theirs.block_size)[first_block:end_block]
        if num_here + num_wanted < prefix.least_end(num_here) or not hashes:
            raise OutOfBlocks(f"room for {num_wanted} blocks of a prefix")
        num_new = 0
        try:
            async with session.prefix(first_block, hashes) as answer:
                covered = _covered_tokens(answer, first_block, len(hashes), theirs)
                await self._pull_into(block_ids, covered, session, answer.ticket, prefix)
            num_new = len(block_ids) - num_here
        finally:
            self._worth.learn(session.link.transport, num_new, num_wanted, started_s)
        return num_new

    async def _pull_into(
        self, block_ids: list[int], covered: int, session: Session, ticket: bytes, prefix: Prefix
    ) -> None:
        """Pull the tokens up to `covered`, and publish the blocks that they fill."""
        layout, num_here = self._layout, len(block_ids)
        num_new, begin = layout.blocks_for(covered) - num_here, layout.tokens_in(num_here)
        if num_new <= 0 or layout.full_blocks(covered) < prefix.least_end(num_here):
            raise StaleTicket(f"{session.peer.node_id} does not have the prefix any more")
        if self._filling.room(num_new) < num_new:
            raise OutOfBlocks(f"no room for {num_new} blocks of a prefix")
        taken = self._pool.allocate(num_new)
        num_full = 0
        try:
            transport = session.link.transport
            timeout_s = self._worth.deadline_s(transport, num_new, self._timeout_s)
            with self._filling.begun(num_new):
                await self._parts.puller.pull(
                    session.link, ticket, block_ids + taken, begin, timeout_s
                )
            num_full = min(layout.full_blocks(covered), len(prefix.hashes)) - num_here
            owner = prefix.prompt.owner
            for index in range(num_full):
                self._pool.publish(taken[index], prefix.hashes[num_here + index], owner)
            block_ids += taken[:num_full]
        finally:
            self._pool.release(taken[num_full:])

    def _hashes_for(self, prefix: Prefix, block_size: int) -> list[bytes]:
        if block_size == self._layout.block_size:
            return prefix.hashes
        return prefix.prompt.hashes(block_size)


def _covered_tokens(
    answer: PrefixAnswer, first_block: int, num_asked: int, theirs: KvLayout
) -> int:
    """The end of the prompt's tokens that the answer's ticket covers; 0: there is no ticket.

    Raises:
        MalformedMessage: the ticket does not match the answer.
        TicketInvalid: it cannot be read.
    """
    if answer.num_blocks == 0:
        return 0
    ticket = read_ticket(answer.ticket)
    first_token = theirs.tokens_in(first_block)
    num_tokens = theirs.tokens_in(answer.num_blocks)
    given = (ticket.first_token, ticket.num_tokens, ticket.first_layer, ticket.end_layer)
    expected = (first_token, num_tokens, 0, theirs.num_layers)
    if answer.num_blocks > num_asked or given != expected:
        raise MalformedMessage(
            f"asked for {num_asked} blocks, given {answer.num_blocks} with a ticket for (first "
            f"token, tokens, first layer, end layer) {given} instead of {expected}"
        )
    return first_token + num_tokens
