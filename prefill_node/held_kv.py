"""The KV of one request that is held for decode nodes to pull, and how much of it is announced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kv_transfer.exporter import Exporter
from kv_transfer.lifecycle import EXPORTER, BlockStates, ExporterMove
from kv_transfer.progress import KvPart, Progress
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request
from pdserve.kv import need


class PinnedBlocks:
    """The blocks of a pool that are held for others; each counts once, whatever else holds it."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._num_holders: Counter[int] = Counter()  # by block id; always > 0

    def __len__(self) -> int:
        return len(self._num_holders)

    def hold(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each block."""
        self._pool.retain(block_ids)
        self._num_holders.update(block_ids)

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each block."""
        for block_id in block_ids:
            if self._num_holders[block_id] == 1:
                del self._num_holders[block_id]
            else:
                self._num_holders[block_id] -= 1
        self._pool.release(block_ids)


class HeldKv:
    """Holds its own references to the announced blocks until `release`."""

    def __init__(self, request_id: str, exporter: Exporter, pinned: PinnedBlocks) -> None:
        self.block_ids: list[int] = []  # from the first token on
        self.request_id = request_id
        self.num_layers = exporter.layout.num_layers
        self._exporter = exporter
        self._layout = exporter.layout
        self._max_tokens = exporter.layout.tokens_in(exporter.max_ticket_blocks)
        self._pinned = pinned
        self._progress = Progress(self.num_layers)
        self._states = BlockStates(EXPORTER, request_id)

    def missing(self, request: Request, num_computed: int, num_layers: int) -> list[KvPart]:
        """Return the parts to announce once `num_computed` tokens have `num_layers` layers of KV.

        Ends at the last complete block, to which nothing will be written any more, or where the
        request ends here. (A step that fails for another request is repeated, and writes the same
        KV again, up to rounding.)
        """
        end_token = request.handed_off_at
        if end_token is None or num_computed < end_token:
            end_token = need.full_tokens(num_computed, self._layout.block_size)
        return self._in_tickets(self._progress.until(end_token, num_layers))

    def announce(self, request: Request, part: KvPart) -> None:
        """Mark the next part as announced, and hold its blocks from now on.

        For the blocks it makes no difference whether a subscriber is told now or later.
        """
        self._progress.take(part)
        blocks = request.block_table[len(self.block_ids) : self._layout.blocks_for(part.end_token)]
        if blocks:
            self._pinned.hold(blocks)
            self.block_ids += blocks  # to be released from now on, whatever fails next
            self._states.move(blocks, ExporterMove.HOLD)
        is_whole = part.end_layer == self.num_layers
        move = ExporterMove.ANNOUNCE if is_whole else ExporterMove.ANNOUNCE_PART
        self._states.move(self._blocks_of(part), move)

    def renew(self) -> list[KvPart]:
        """Return everything announced so far as parts, which are to be announced again."""
        parts = self._in_tickets(self._progress.whole())
        for part in parts:
            self._states.move(self._blocks_of(part), ExporterMove.RENEW)
        return parts

    def ticket(self, part: KvPart) -> bytes:
        """Issue a fresh ticket for an announced part."""
        return self._exporter.issue(
            self.request_id,
            part.first_token,
            part.end_token - part.first_token,
            self._blocks_of(part),
            part.layers,
        )

    def num_bytes(self, parts: Sequence[KvPart]) -> int:
        """Return the size of the parts' KV."""
        num_cells = sum((part.end_token - part.first_token) * len(part.layers) for part in parts)
        return num_cells * self._layout.token_bytes // self.num_layers

    def release(self) -> None:
        """Release all held blocks, even those whose state does not allow it, which is a bug."""
        if self.block_ids:
            blocks, self.block_ids = self.block_ids, []
            self._pinned.release(blocks)
            self._states.move(blocks, ExporterMove.RELEASE)
        self._states.check_ended()

    def _in_tickets(self, parts: Sequence[KvPart]) -> list[KvPart]:
        """Split the parts into those of a ticket each.

        Some layers of a chunk can only be announced as one part. If that is too large, they are
        left out, and all its layers are announced at its end. So a chunk that has begun fits.
        """
        return [
            piece
            for part in parts
            for piece in part.pieces(self._max_tokens)
            if piece == part or part.end_layer == self.num_layers
        ]

    def _blocks_of(self, part: KvPart) -> list[int]:
        first_block = self._layout.full_blocks(part.first_token)
        return self.block_ids[first_block : self._layout.blocks_for(part.end_token)]
