"""The queues of an engine and the few moves a policy makes on them.

    submit ──► waiting ──admit──► running ──finish──► gone
                ▲   ▲                │
    claims ──reserve──► arriving ──adopt
                │   └────preempt─────┤   (KV dropped, tokens kept)
                └── away ◄─recall────┘   (its KV is fetched, where that is cheaper)

A request is admitted with blocks for all its tokens or not at all, so requests half-way through
their prompts can never wait for each other's blocks. Decoding requests grow block by block; when
none is left, somebody gives way (`victims.py`). How much is left free for them to grow into is
`kv_headroom.py`. Policies only choose the order and the amounts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from pdserve.clock import Clock, Stopwatch
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.kv_headroom import KvHeadroom
from pdserve.engine.preemption import Preemptions
from pdserve.engine.prompts.uncached import num_uncached
from pdserve.engine.request import Request, Scheduled, one_token_each
from pdserve.engine.victims import Victims


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
        self.kept_out: Request | None = None  # comes next, but could not be begun at the last plan
        self.claims: list[Request] = []  # handed over, without room here yet
        self.arriving: set[Request] = set()  # handed over: blocks here, KV on its way
        self.headroom = KvHeadroom(pool.block_size)
        self.victims = Victims()
        self.preemptions = Preemptions(pool.block_size)
        self.held_back = Stopwatch(clock)  # runs while a policy, not the pool, keeps a prompt out
        self._clock = clock

    @property
    def streams(self) -> list[Request]:
        """Requests that decode here, or will as soon as their prompt's KV is complete."""
        return [r for r in self.running if r.decodes_here] + list(self.arriving)

    def beside(self, newcomer: Request) -> list[Request]:
        """Streams that it would decode with.

        One whose prompt has been computed elsewhere does not wait for those whose prompt has not:
        they join the batch later.
        """
        streams = self.streams
        if newcomer.output_token_ids or newcomer.lifecycle.prefill_end_s is None:
            return streams
        return [r for r in streams if r.output_token_ids or r.lifecycle.prefill_end_s is not None]

    @property
    def decoding(self) -> list[Request]:
        """Running requests that are at one token a step, oldest first."""
        return [
            request
            for request in self.running
            if (num_output := len(request.output_token_ids))  # `is_decoding`, written out
            and len(request.prompt_token_ids) + num_output - request.num_computed_tokens == 1
        ]

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens accepted that are neither computed yet nor in the prefix cache."""
        waiting = sum(num_uncached(request, self.pool) for request in self.waiting)
        return waiting + sum(r.num_uncomputed_tokens for r in self.running if not r.is_decoding)

    # ---- moves ---------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Last in line; one that was away, first."""
        if request in self.preemptions.away:
            self.preemptions.away.discard(request)
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)

    def admit(self, request: Request, num_kept_free: int = 0, *, is_alone: bool = True) -> bool:
        """Give a waiting request its blocks and let it run; False: no room now, or it is recalled.

        `num_kept_free` blocks stay free beside it, unless it is alone: nothing else runs either.
        """
        pool = self.pool
        request.extend_hashes(request.num_tokens, pool.block_size)
        reusable = request.block_hashes[: request.num_reusable_tokens // pool.block_size]
        num_left = self._num_left(request.num_tokens, reusable, request)
        if (self.running or not is_alone) and 0 <= num_left < num_kept_free:
            self.held_back.start()
            return False
        if num_left < 0 or self.is_closed_to(request):
            return False
        if self.preemptions.calls_back(request):
            self.waiting.remove(request)
            return False
        blocks = self.reserve(request.num_tokens, reusable, request)
        assert blocks is not None, "there was room a moment ago"
        request.block_table, num_reused = blocks
        request.num_computed_tokens = num_reused * pool.block_size
        if not request.output_token_ids:
            request.num_cached_tokens = request.num_computed_tokens
        if request.num_preemptions:
            self.preemptions.came_back(request)
        self.waiting.remove(request)
        self.running.append(request)
        if request.lifecycle.scheduled_s is None:
            request.lifecycle.scheduled_s = self._clock.now()
        return True

    def reserve(
        self, num_tokens: int, hashes: Sequence[bytes], newcomer: Request | None = None
    ) -> tuple[list[int], int] | None:
        """Blocks for `num_tokens` tokens, the first of them reused from the prefix cache if held.

        Returns (block table, number of reused blocks), or None when there is no room: streams keep
        room to grow into, the newcomer's own included, so that admission does not cause preemption.
        """
        if self._num_left(num_tokens, hashes, newcomer) < 0:
            return None
        pool = self.pool
        taken = pool.take_prefix(hashes)
        return taken + pool.allocate(-(-num_tokens // pool.block_size) - len(taken)), len(taken)

    def is_closed_to(self, newcomer: Request) -> bool:
        """Whether it must wait because somebody was preempted a moment ago."""
        return self.preemptions.keeps_out(newcomer, is_alone=not self.streams)

    def num_missing(self, newcomer: Request, preempted: Sequence[Request] = ()) -> int:
        """Blocks lacking for one that waits, here or for being handed over; 0: there is room.

        Or there would be, if these running requests were preempted for it.
        """
        is_claim = newcomer in self.claims
        num_tokens = newcomer.num_tokens + is_claim  # token 1 comes along
        newcomer.extend_hashes(newcomer.num_tokens, self.pool.block_size)
        num_reusable = newcomer.num_reusable_tokens + is_claim
        hashes = newcomer.block_hashes[: num_reusable // self.pool.block_size]
        gained = self.pool.num_sole([b for request in preempted for b in request.block_table])
        return max(0, -self._num_left(num_tokens, hashes, newcomer, preempted) - gained)

    def grow(self, request: Request) -> bool:
        """Make sure the request has a block for its next token; preempts others for it.

        False: the request itself was preempted (`Victims.choose`).
        """
        pool = self.pool
        if len(request.block_table) * pool.block_size >= request.num_tokens:
            return True
        while pool.num_free == 0:
            victim = self.victims.choose(self.running, request)
            self.preempt(victim)
            if victim is request:
                return False
        request.block_table += pool.allocate(1)
        return True

    def preempt(self, request: Request, *, for_priority: bool = False) -> None:
        """Drop a running request's KV; its tokens stay, and it waits first in line.

        Not while a step runs that has the request in it.
        """
        self.running.remove(request)
        self.pool.release(request.block_table)
        request.block_table = []
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)
        self.preemptions.preempted(request, for_priority=for_priority)

    def remove(self, request: Request) -> None:
        """Take a request out, and free its blocks."""
        if request is self.kept_out:
            self.kept_out = None
        if request in self.waiting:
            self.waiting.remove(request)
        elif request not in self.preemptions.away:
            self.running.remove(request)
        self.preemptions.forget(request)
        if request.finish_reason is not None and request.decodes_here:
            self.headroom.estimate.observe(len(request.output_token_ids))
        self.pool.release(request.block_table)
        request.block_table = []

    # ---- the two halves of a plan --------------------------------------------------------------

    def plan_decodes(self, max_requests: int) -> list[Scheduled]:
        """One token for each decoding request, oldest first."""
        return self.decode(self.decoding[:max_requests])

    def decode(self, requests: Sequence[Request]) -> list[Scheduled]:
        """One token for each of these decoding requests; some may be preempted for the others."""
        self.preemptions.step_planned()
        size = self.pool.block_size
        growing = [r for r in requests if len(r.block_table) * size <= r.num_computed_tokens]
        for request in growing:
            if request.block_table:  # else it has just given way
                self.grow(request)
        if growing:
            requests = [request for request in requests if request.block_table]
        return one_token_each(requests)

    # ---- room ----------------------------------------------------------------------------------

    def _num_left(
        self,
        num_tokens: int,
        hashes: Sequence[bytes],
        newcomer: Request | None,
        preempted: Sequence[Request] = (),
    ) -> int:
        """Free blocks that would be left beside a request of these; negative: it does not fit.

        Nothing is kept free for the ones that are to be preempted.
        """
        pool = self.pool
        matched = pool.match_prefix(hashes)
        num_new = -(-num_tokens // pool.block_size) - len(matched)
        if newcomer is not None and not newcomer.decodes_here:
            newcomer = None  # it ends without growing
        streams = [stream for stream in self.streams if stream not in preempted]
        num_kept = self.headroom.num_kept_free(streams, newcomer)
        return pool.num_free_after_taking(matched) - num_new - num_kept
