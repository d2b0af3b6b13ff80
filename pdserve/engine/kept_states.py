"""Which states a step keeps, as snapshots that later requests go on behind.

A state is kept where others are likely to go on: at the end of a prompt, which the next one of its
conversation begins with; where a prompt parts from what was computed before, since a third may part
there, too; and while an answer is made, at every so many blocks, each in place of the one before.

A step keeps one state of a request. So a chunk that would pass two such places ends at the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pdserve.engine.kv.snapshots import Snapshots
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.kv import need

STRIDE: Final = 16  # blocks of an answer from one snapshot to the next


class KeptStates:
    """Of the requests of one engine."""

    def __init__(self, queues: Queues, snapshots: Snapshots) -> None:
        self._queues = queues
        self._pool = queues.pool
        self._snapshots = snapshots

    def plan(self, rows: Sequence[Scheduled]) -> list[Scheduled]:
        """Give rows blocks to keep a state in, where one is to be kept, and end them in time."""
        return [self._with_room(row) for row in rows]

    def advanced(self, request: Request) -> None:
        """The step is over that has computed the request's tokens: what it kept can be found."""
        self._pool.release(request.state_source)
        request.state_source = []
        if (kept := request.kept_state) is None:
            return
        request.kept_state = None
        num_tokens, blocks = kept
        num_by_prefill = request.num_by_prefill
        if num_tokens <= (request.num_hashed_tokens if num_by_prefill is None else num_by_prefill):
            request.extend_hashes(num_tokens, self._pool.block_size)
            block_hash = request.block_hashes[num_tokens // self._pool.block_size - 1]
            self._snapshots.publish(blocks, block_hash, num_tokens, request.prompt.owner)
            if request.output_token_ids:
                self._follow(request, block_hash)
        self._pool.release(blocks)

    def failed(self, request: Request) -> None:
        """The step did not keep it."""
        if request.kept_state is not None:
            self._pool.release(request.kept_state[1])
            request.kept_state = None

    def _follow(self, request: Request, block_hash: bytes) -> None:
        """Let go of the answer's last one, which nobody needs behind whom this one is."""
        before, request.answer_state = request.answer_state, block_hash
        if before in self._snapshots and before != block_hash:
            self._snapshots.drop(before)

    def _with_room(self, row: Scheduled) -> Scheduled:
        request, num_tokens = row
        places = self._places(request, request.num_computed_tokens + num_tokens)
        if not places:
            return row
        if len(places) > 1:
            row = Scheduled(request, places[0] - request.num_computed_tokens)
        if self._has_room():
            request.kept_state = places[0], self._pool.allocate(self._pool.state_blocks)
        return row

    def _places(self, request: Request, end: int) -> list[int]:
        """Where its state is to be kept, in tokens, up to `end`."""
        first = request.num_computed_tokens
        if request.is_decoding:
            stride = self._pool.tokens_in(STRIDE)
            return [end] if end % stride == 0 else []
        prompt_end = need.full_tokens(request.num_prompt_tokens - 1, self._pool.block_size)
        places = {request.parts_at, prompt_end}
        return sorted(place for place in places if first < place <= end)

    def _has_room(self) -> bool:
        """Whether no stream lacks blocks for it."""
        queues = self._queues
        num_kept = queues.headroom.num_kept_free(queues.streams, None)
        return self._snapshots.is_possible and (
            self._pool.num_free - self._pool.state_blocks >= num_kept
        )
