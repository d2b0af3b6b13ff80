"""The queues of an engine and the few moves a policy makes on them.

    submit ──► waiting ──admit──► running ──finish──► gone
                  ▲                  │
    adopt ────────┼─────────────────►│
                  └─────preempt──────┘   (recompute: KV dropped, tokens kept)

A request is admitted with blocks for all its tokens or not at all, so requests half-way through
their prompts can never wait for each other's blocks. Decoding requests grow block by block; when
none is left, the youngest gives way. Policies (`prefill_node/scheduler.py`,
`decode_node/scheduler.py`) only choose the order and the amounts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from pdserve.clock import Clock, Stopwatch
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.request import Request, Scheduled


class Policy(Protocol):
    """Chooses what one step computes. One small file per policy."""

    def plan(self, queues: Queues) -> list[Scheduled]:
        """The next step's rows, each with blocks for what it computes; none: nothing to do."""
        ...


class Queues:
    """Requests waiting and running over one block pool."""

    def __init__(self, pool: BlockPool, clock: Clock) -> None:
        self.pool = pool
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.num_preemptions = 0
        self.held_back = Stopwatch(clock)  # runs while a policy, not the pool, keeps a prompt out
        self._clock = clock

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens accepted and not computed yet."""
        waiting = sum(r.num_uncomputed_tokens for r in self.waiting)
        return waiting + sum(r.num_uncomputed_tokens for r in self.running if not r.is_decoding)

    # ---- moves ---------------------------------------------------------------------------------

    def admit(self, request: Request, num_kept_free: int = 0, *, is_alone: bool = True) -> bool:
        """Give the first waiting request its blocks and let it run; False: no room now.

        `num_kept_free` blocks stay free beside it, unless it is alone: nothing else runs either.
        """
        pool = self.pool
        request.extend_hashes(request.num_tokens, pool.block_size)
        # At least one token must be computed to have logits, however much is cached.
        reusable = request.block_hashes[: (request.num_tokens - 1) // pool.block_size]
        num_left = self._num_left(request.num_tokens, reusable)
        if (self.running or not is_alone) and 0 <= num_left < num_kept_free:
            self.held_back.start()
            return False
        blocks = self.reserve(request.num_tokens, reusable)
        if blocks is None:
            return False
        request.block_table, num_reused = blocks
        request.num_computed_tokens = num_reused * pool.block_size
        if not request.output_token_ids:
            request.num_cached_tokens = request.num_computed_tokens
        self.waiting.remove(request)
        self.running.append(request)
        if request.lifecycle.scheduled_s is None:
            request.lifecycle.scheduled_s = self._clock.now()
        return True

    def reserve(self, num_tokens: int, hashes: Sequence[bytes]) -> tuple[list[int], int] | None:
        """Blocks for `num_tokens` tokens, the first of them reused from the prefix cache if held.

        Returns (block table, number of reused blocks), or None when there is no room: each running
        request that will decode here keeps a block to grow into, so that admission does not cause
        preemption.
        """
        if self._num_left(num_tokens, hashes) < 0:
            return None
        pool = self.pool
        taken = pool.take_prefix(hashes)
        return taken + pool.allocate(-(-num_tokens // pool.block_size) - len(taken)), len(taken)

    def grow(self, request: Request) -> bool:
        """Make sure the request has a block for its next token; preempts others for it.

        False: the request itself was preempted, as the youngest one left.
        """
        pool = self.pool
        if len(request.block_table) * pool.block_size >= request.num_tokens:
            return True
        while pool.num_free == 0:
            youngest = self.running[-1]
            self.preempt(youngest)
            if youngest is request:
                return False
        request.block_table += pool.allocate(1)
        return True

    def preempt(self, request: Request) -> None:
        """Drop a running request's KV; its tokens stay, and it waits first in line."""
        self.num_preemptions += 1
        self.running.remove(request)
        self.pool.release(request.block_table)
        request.block_table = []
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)

    def remove(self, request: Request) -> None:
        """Take a request out, and free its blocks."""
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
        self.pool.release(request.block_table)
        request.block_table = []

    # ---- the two halves of a plan --------------------------------------------------------------

    def plan_decodes(self, max_requests: int) -> list[Scheduled]:
        """One token for each decoding request, oldest first."""
        rows: list[Scheduled] = []
        for request in list(self.running):
            if len(rows) == max_requests:
                break
            # Without blocks it was preempted a moment ago, for an older one to grow.
            if request.is_decoding and request.block_table and self.grow(request):
                rows.append(Scheduled(request, 1))
        return rows

    def plan_prefills(
        self,
        token_budget: int,
        max_requests: int,
        num_kept_free: int = 0,
        *,
        is_alone: bool = True,
    ) -> list[Scheduled]:
        """Chunks of prompts, first come first served, up to `token_budget` tokens together.

        None is begun that would leave fewer than `num_kept_free` blocks, unless nothing runs and
        the caller, too, has no blocks in use (`is_alone`).
        """
        self.held_back.stop()
        rows: list[Scheduled] = []
        partial = [r for r in self.running if not r.is_decoding]
        while token_budget > 0 and len(rows) < max_requests:
            if partial:
                request = partial.pop(0)
            elif self.waiting and self.admit(self.waiting[0], num_kept_free, is_alone=is_alone):
                request = self.running[-1]
            else:
                break
            num_tokens = min(request.num_uncomputed_tokens, token_budget)
            token_budget -= num_tokens
            rows.append(Scheduled(request, num_tokens))
        return rows

    # ---- room ----------------------------------------------------------------------------------

    def _num_left(self, num_tokens: int, hashes: Sequence[bytes]) -> int:
        """Free blocks that would be left beside a request of these; negative: it does not fit."""
        pool = self.pool
        matched = pool.match_prefix(hashes)
        num_new = -(-num_tokens // pool.block_size) - len(matched)
        headroom = sum(1 for running in self.running if running.leg_token_limit is None)
        return pool.num_free_after_taking(matched) - num_new - headroom
