"""The queues of an engine and the operations that policies apply to them.

    submit ──► waiting ──admit──► running ──finish──► gone
                ▲   ▲                │
    claims ──reserve──► arriving ──adopt
                │   └────preempt─────┤   (KV dropped, tokens kept)
                └── away ◄─recall────┘   (its KV is fetched, where that is cheaper)

A request is admitted with blocks for all its tokens or not at all, so partly prefilled requests can
never wait for each other's blocks. Decoding requests grow block by block; when no block is free, a
request is preempted. `kv/shortage.py` decides which one, and how many blocks admission leaves free
for this growth. Policies only choose the order and the number of tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.kv.shortage import CouldFetch, KvHeadroom, Preemptions, Victims, all_recomputed
from pdserve.engine.prompts.order import num_uncached
from pdserve.engine.request import Request, Scheduled, one_token_each
from pdserve.shared.clock import Clock, Stopwatch


class StepRuns(Exception):
    """What is planned or prepared while a step runs must wait for the end of that step."""


class Policy(Protocol):
    """Chooses what one step computes. One small file per policy."""

    def plan(self, queues: Queues) -> list[Scheduled]:
        """Return the next step's rows, each with blocks for its tokens; none if nothing to do.

        Raises:
            StepRuns: as Queues.preempt; let it pass.
        """
        ...


class Queues:
    """Requests waiting and running over one block pool."""

    def __init__(
        self,
        pool: BlockPool,
        clock: Clock,
        headroom: KvHeadroom | None = None,
        victims: Victims | None = None,
        could_fetch: CouldFetch = all_recomputed,
    ) -> None:
        """
        Args:
            pool: the blocks.
            clock: the engine's.
            headroom: how many blocks admission leaves free; None: one for each stream.
            victims: whom to preempt; None: the rule with its default setting.
            could_fetch: whether KV of a preempted request is elsewhere.
        """
        self.pool = pool
        self.clock = clock
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.kept_out: Request | None = None  # next in line, but not admitted at the last plan
        self.claims: list[Request] = []  # being handed off to this node, no room for them yet
        self.arriving: set[Request] = set()  # being handed off: blocks reserved, KV in transfer
        self.headroom = headroom or KvHeadroom(pool.block_size)
        self.victims = victims or Victims()
        self.preemptions = Preemptions(pool.block_size, could_fetch)
        self.held_back = Stopwatch(clock)  # runs while a policy, not the pool, keeps a prompt out
        # Running, in a step beside the one that is planned; out of date when the plan is made.
        self.elsewhere: AbstractSet[Request] = frozenset()
        self.are_foreseen = False  # as they will be after a step that runs (`foresight.py`)

    @property
    def is_empty(self) -> bool:
        """Whether nothing runs, waits, or is being handed off to this node."""
        return not (self.running or self.waiting or self.claims or self.arriving)

    @property
    def streams(self) -> list[Request]:
        """Requests that decode here, or will once their prompt's KV is complete."""
        return [r for r in self.running if r.decodes_here] + list(self.arriving)

    def beside(self, newcomer: Request) -> list[Request]:
        """Return the streams that the newcomer would be batched with in decode.

        A newcomer whose prompt was computed on another node starts decoding at once, so streams
        whose prompt is not computed yet do not count: they join the batch later.
        """
        streams = self.streams
        if newcomer.output_token_ids or newcomer.lifecycle.prefill_end_s is None:
            return streams
        return [r for r in streams if r.output_token_ids or r.lifecycle.prefill_end_s is not None]

    @property
    def between_steps(self) -> list[Request]:
        """Running requests that no step computes while the next one is planned."""
        if not self.elsewhere:
            return self.running
        return [request for request in self.running if request not in self.elsewhere]

    @property
    def decoding(self) -> list[Request]:
        """Running requests in decode (one token per step), oldest first.

        One that lacks just a token may also be computed elsewhere, as a prompt that came back.
        """
        return [
            request
            for request in self.between_steps
            if (num_output := len(request.output_token_ids))  # `is_decoding`, inlined for speed
            and len(request.prompt_token_ids) + num_output - request.num_computed_tokens == 1
        ]

    @property
    def queued_tokens(self) -> int:
        """Uncomputed, uncached tokens of all waiting and partly prefilled requests."""
        waiting = sum(num_uncached(request, self.pool) for request in self.waiting)
        return waiting + sum(r.num_uncomputed_tokens for r in self.running if not r.is_decoding)

    # ---- moves ---------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Put a request at the end of the waiting queue, or at its front after a recall."""
        if request in self.preemptions.away:
            self.preemptions.away.discard(request)
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)

    def admit(self, request: Request, num_kept_free: int = 0, *, is_alone: bool = True) -> bool:
        """Admit a waiting request: give it blocks for all its tokens and move it to `running`.

        Returns False if there is no room now, or if its KV is being recalled. Admission leaves
        `num_kept_free` blocks free, unless the request is alone: `is_alone`, and nothing runs.
        """
        pool = self.pool
        request.extend_hashes(request.num_tokens, pool.block_size)
        known = request.block_hashes[: pool.full_blocks(request.num_reusable_tokens)]
        reusable = pool.usable(known)
        num_left = self._num_left(request.num_tokens, reusable, request)
        if (self.running or not is_alone) and 0 <= num_left < num_kept_free:
            num_left += pool.want(num_kept_free - num_left)
            if num_left < num_kept_free:
                self.held_back.start()
                return False
        if num_left < 0 or self.is_closed_to(request):
            return False
        if self.preemptions.calls_back(request):
            self.waiting.remove(request)
            return False
        if pool.snapshots is not None:
            num_known = len(pool.match_prefix(known))
            request.parts_at = pool.tokens_in(num_known) if num_known > len(reusable) else 0
            request.state_source = pool.snapshots.take(reusable[-1]) if reusable else []
        blocks = self.reserve(request.num_tokens, reusable, request)
        assert blocks is not None, "there was room a moment ago"
        request.block_table, num_reused = blocks
        request.state_blocks = pool.allocate(pool.state_blocks)
        request.num_computed_tokens = pool.tokens_in(num_reused)
        if request.num_by_prefill is not None:
            request.num_by_prefill = request.num_computed_tokens
        request.num_passed = 0
        self.pass_windows(request, request.num_computed_tokens + 1)
        if not request.output_token_ids:
            request.num_cached_tokens = request.num_computed_tokens
        if request.num_preemptions:
            self.preemptions.came_back(request)
        request.gave_place = False
        self.waiting.remove(request)
        self.running.append(request)
        if request.lifecycle.scheduled_s is None:
            request.lifecycle.scheduled_s = self.clock.now()
        return True

    def reserve(
        self,
        num_tokens: int,
        hashes: Sequence[bytes],
        newcomer: Request | None = None,
        num_passed: int = 0,
    ) -> tuple[list[int], int] | None:
        """Allocate blocks for `num_tokens` tokens, reusing blocks from the prefix cache first.

        The first `num_passed` come without companions. Returns (block table, number of reused
        blocks), or None when there is no room. Headroom is kept for the newcomer to grow, and for
        all streams of its priority and above, so that admission does not preempt any of them.
        """
        if self._num_left(num_tokens, hashes, newcomer, num_passed=num_passed) < 0:
            return None
        pool = self.pool
        taken = pool.take_prefix(hashes)
        pool.pass_windows(taken[:num_passed])
        num_new = pool.blocks_for(num_tokens) - len(taken)
        return taken + pool.allocate(num_new, max(0, num_passed - len(taken))), len(taken)

    def pass_windows(self, request: Request, num_tokens: int) -> None:
        """Give back what no row of the request sees any more, of which so many tokens are next."""
        passed = self.pool.num_passed(num_tokens)
        if passed > request.num_passed:
            self.pool.pass_windows(request.block_table[request.num_passed : passed])
            request.num_passed = passed

    def is_closed_to(self, newcomer: Request) -> bool:
        """Whether the newcomer must wait because of a recent preemption."""
        return self.preemptions.keeps_out(newcomer, is_alone=not self.streams)

    def num_missing(self, newcomer: Request, preempted: Sequence[Request] = ()) -> int:
        """Return how many blocks are missing to admit a waiting request or a claim; 0 if none.

        The running requests in `preempted` are counted as if they had been preempted for it.
        """
        is_claim = newcomer in self.claims
        num_tokens = newcomer.num_tokens + is_claim  # token 1 comes along
        num_passed = self.pool.num_passed(newcomer.num_pulled_tokens) if is_claim else 0
        newcomer.extend_hashes(newcomer.num_tokens, self.pool.block_size)
        num_reusable = newcomer.num_reusable_tokens + is_claim
        hashes: Sequence[bytes] = newcomer.block_hashes[: self.pool.full_blocks(num_reusable)]
        if not is_claim:
            hashes = self.pool.usable(hashes)
        gained = self.pool.num_sole(
            [b for request in preempted for b in (*request.block_table, *request.state_blocks)]
        )
        num_left = self._num_left(num_tokens, hashes, newcomer, preempted, num_passed)
        return max(0, -num_left - gained)

    def grow(self, request: Request) -> bool:
        """Give the request a block for its next token, preempting other requests if needed.

        Returns False if the request itself was preempted (`Victims.choose`).
        """
        pool = self.pool
        if len(request.block_table) * pool.block_size >= request.num_tokens:
            return True
        while pool.num_free == 0 and not pool.want(1):
            victim = self.victims.choose(self.between_steps, request)
            self.preempt(victim)
            if victim is request:
                return False
        request.block_table += pool.allocate(1)
        return True

    def preempt(self, request: Request, *, for_priority: bool = False) -> None:
        """Release a running request's blocks and put it, with its tokens, at the head of `waiting`.

        Must not be called while a step that contains the request is running.

        Raises:
            StepRuns: a step is planned while one runs; the plan is dropped, and made again later.
        """
        if self.are_foreseen:
            raise StepRuns
        self.running.remove(request)
        self._release(request)
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)
        self.preemptions.preempted(request, for_priority=for_priority)

    def remove(self, request: Request) -> None:
        """Remove a request from the queues and free its blocks."""
        if request is self.kept_out:
            self.kept_out = None
        if request in self.waiting:
            self.waiting.remove(request)
        elif request not in self.preemptions.away:
            self.running.remove(request)
        self.preemptions.forget(request)
        if request.finish_reason is not None and request.decodes_here:
            self.headroom.lengths.observe(len(request.output_token_ids))
        self._release(request)

    # ---- the two halves of a plan --------------------------------------------------------------

    def plan_decodes(self, max_requests: int) -> list[Scheduled]:
        """Plan one token for each of the first `max_requests` decoding requests, oldest first."""
        return self.decode(self.decoding[:max_requests])

    def decode(self, requests: Sequence[Request]) -> list[Scheduled]:
        """Plan one token for each of these decoding requests; some may be preempted for others."""
        self.preemptions.steps_planned()
        size = self.pool.block_size
        growing = [r for r in requests if len(r.block_table) * size <= r.num_computed_tokens]
        for request in growing:
            if request.block_table:  # else it was just preempted
                self.grow(request)
        if growing:
            requests = [request for request in requests if request.block_table]
        return one_token_each(requests)

    def nothing_planned(self) -> None:
        """Note a step that no policy was asked for, because the queues are empty."""
        self.held_back.stop()
        self.kept_out = None
        self.preemptions.steps_planned()

    # ---- room ----------------------------------------------------------------------------------

    def _num_left(
        self,
        num_tokens: int,
        hashes: Sequence[bytes],
        newcomer: Request | None,
        preempted: Sequence[Request] = (),
        num_passed: int = 0,
    ) -> int:
        """Return the free blocks left after admitting this request; negative if it does not fit.

        No headroom is counted for the streams in `preempted`; `num_passed` as in `reserve`.
        """
        pool = self.pool
        matched = pool.match_prefix(hashes)
        source = pool.snapshots.blocks(hashes[-1]) if pool.snapshots and len(hashes) else []
        num_new = pool.blocks_for(num_tokens) - len(matched) + pool.state_blocks
        streams = [stream for stream in self.streams if stream not in preempted]
        if newcomer is not None and not newcomer.decodes_here:
            newcomer = None  # it does not decode here, so it needs no headroom
        elif newcomer is not None:
            # What is less important gives way once a block is needed, and not before.
            priority = newcomer.targets.priority
            streams = [stream for stream in streams if stream.targets.priority >= priority]
        num_kept = self.headroom.num_kept_free(streams, newcomer)
        num_bare = max(0, num_passed - len(matched))
        num_left = pool.num_free_after_taking([*matched, *source], num_new, num_bare) - num_kept
        return num_left + pool.want(-num_left) if num_left < 0 else num_left

    def _release(self, request: Request) -> None:
        self.pool.release(request.block_table, request.num_passed)
        if self.pool.state_blocks:
            kept = [] if request.kept_state is None else request.kept_state[1]
            self.pool.release([*request.state_blocks, *request.state_source, *kept])
            request.state_blocks, request.state_source, request.kept_state = [], [], None
        request.block_table = []
        request.num_passed = 0
