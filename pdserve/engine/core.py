"""The engine's state and state changes: plan a step, and apply what it sampled. It never waits.

`engine.Engine` drives it with a model in a thread; a simulation drives it with a simulated clock.
Requests and blocks used by a step are not touched until the step is over, so every verb may be
called while a step runs.

Two cores may share queues, and with them requests and blocks, each with a step of its own that runs
beside that of the other one (`beside`): one for decodes, and one for prompts. A request is in one
step at a time, and is not preempted while it is: what a core plans leaves out what the other one
computes (`Queues.elsewhere`).

On a device, the step after one of decodes may be launched before that one has ended: it is planned
by foresight (`step_ahead`), and both are under way for a while. The first is over with `end_step`.
What it ends leaves the queues, but keeps its blocks until the second is over as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from math import inf

from msgspec.structs import replace

from pdserve.engine.foresight import are_foreseeable, foreseen
from pdserve.engine.kept_states import KeptStates
from pdserve.engine.request import Request, SampledToken, Scheduled, by_adapter, end_after, finish
from pdserve.engine.scheduler import Policy, Queues, StepRuns
from pdserve.protocol import FinishReason

Hold = Callable[[Sequence[Scheduled]], Collection[Request]]
Speculate = Callable[[list[Scheduled]], list[Scheduled]]
Awaits = Callable[[Sequence[Scheduled], float], bool]
Draft = Callable[[], Callable[[], None] | None]


def no_drafts() -> None:
    """Draft nothing: a `Draft`."""


class EngineCore:
    """Runs requests over one KV pool, one step after the other."""

    def __init__(
        self,
        queues: Queues,
        policy: Policy,
        eos_token_ids: frozenset[int],
        beside: EngineCore | None = None,
    ) -> None:
        """With `beside`, it computes requests of that core. All verbs are called on that one."""
        self.pool = queues.pool
        self.policy = policy  # may be replaced between steps
        self.queues = queues
        self._beside = beside
        self.eos_token_ids = eos_token_ids
        self.hold: Hold = lambda rows: ()  # which requests of a plan are not ready, and sit it out
        self.speculate: Speculate = lambda rows: rows  # gives requests drafts, and rows with them
        # Whether the next step is planned with the tokens of this one, if a device waits so long.
        self.awaits: Awaits = lambda rows, gap_s: False
        self._states = None if (of := queues.pool.snapshots) is None else KeptStates(queues, of)
        self.draft: Draft = no_drafts  # what is computed before a plan, while no step runs
        self._requests: dict[str, Request] = {}
        if beside is not None:
            beside._beside = self
            self._requests = beside._requests
        self._in_step: set[Request] = set()  # of the steps that are under way
        self._in_step_ahead: set[Request] = set()  # of these: in the second one
        self._kept: list[int] = []  # blocks of ended requests that the second one still uses
        self.next_deadline_s = inf  # no request that was given to this core has an earlier one

    # ---- verbs ---------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request for prefill here, and for decode unless it is a prefill leg."""
        self._add(request)
        self.queues.submit(request)

    def adopt(self, request: Request) -> None:
        """Go on with a request whose block table already holds its prompt's KV.

        One that was interrupted may lack that of its output, which is computed here.
        """
        assert request.num_prompt_tokens <= request.num_computed_tokens < request.num_tokens
        self._add(request)
        self._publish_full_blocks(request, 0)
        self.queues.arriving.discard(request)
        self.queues.running.append(request)

    def reserve(
        self,
        num_tokens: int,
        hashes: Sequence[bytes],
        newcomer: Request | None = None,
        num_passed: int = 0,
    ) -> tuple[list[int], int] | None:
        """Reserve blocks for a request to be adopted, without companions for the first few.

        Returns (block table, number of reused blocks), or None if there is no room now or other
        requests are waiting for it. With `newcomer`, the waiting queue is not considered: the
        caller has made sure that this request is next in line.
        """
        queues = self.queues
        must_wait = bool(queues.waiting) if newcomer is None else queues.is_closed_to(newcomer)
        return None if must_wait else queues.reserve(num_tokens, hashes, newcomer, num_passed)

    def cancel(self, request_id: str) -> bool:
        """Stop a request and free its blocks, now or when the step that uses them has ended.

        Returns whether the engine had the request.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        was_done = request.is_done
        for answer in request.answers:
            answer.is_cancelled = True
        if not self._is_in_step(request) and not was_done:  # else it is removed at the step's end
            self._remove(request)
        return True

    def find(self, request_id: str) -> Request | None:
        """Return the request of this id, if it is in the engine."""
        return self._requests.get(request_id)

    @property
    def num_requests(self) -> int:
        """Number of requests in the engine, waiting or running."""
        return len(self._requests)

    # ---- a step --------------------------------------------------------------------------------

    def drop_expired(self, now_s: float) -> list[Request]:
        """Cancel the requests whose deadline has passed, and return them; their blocks are free.

        Must not be called while a step runs. Blocks that a core beside this one uses are free when
        its step has ended.
        """
        if now_s < self.next_deadline_s:
            return []
        requests = list(self._requests.values())
        expired = [request for request in requests if request.targets.deadline_s <= now_s]
        for request in expired:
            self.cancel(request.request_id)
        left = (request.targets.deadline_s for request in self._requests.values())
        self.next_deadline_s = min(left, default=inf)
        return expired

    def begin_step(self) -> list[Scheduled]:
        """Plan the next step; no rows if there is nothing to do.

        The step is completed by `end_step` or `abandon_step`.
        """
        if self._beside is not None:
            self.queues.elsewhere = self._beside._in_step
        rows = self.policy.plan(self.queues)
        if held := self.hold(rows):
            rows = [row for row in rows if row.request not in held]
        if self._states is not None:
            rows = self._states.plan(rows)
        rows = by_adapter(self.speculate(rows))
        self._in_step = {row.request for row in rows}
        return rows

    @contextmanager
    def step_ahead(self, rows: Sequence[Scheduled], now_s: float) -> Iterator[list[Scheduled]]:
        """Plan the step after one of decodes that runs; no rows if that must wait for its end.

        Within the context, requests are as they will be then: see `foreseen`. If it ends without an
        error, the step is under way, and is completed as any other, after the one that runs.

        Args:
            rows: of the step that runs, those included whose requests ended before it did.
            now_s: the time.
        """
        if now_s >= self.next_deadline_s or not are_foreseeable(self.queues):
            yield []
            return
        with foreseen(self.queues, rows):
            try:
                planned = self.policy.plan(self.queues)
            except StepRuns:
                planned = []
            yield planned
        self._in_step_ahead = {row.request for row in planned}
        self._in_step |= self._in_step_ahead

    def are_in_step(self, rows: Sequence[Scheduled]) -> list[bool]:
        """Return of each row whether its request did not end before this step was over."""
        return [row.request in self._in_step for row in rows]

    def end_step(
        self, rows: Sequence[Scheduled], sampled: Sequence[SampledToken | None], now_s: float
    ) -> list[Request]:
        """Advance every request of the step. Return those that are done, for `forget`.

        Of rows with drafts, `sampled` has what `accepted` leaves of it.

        Of a step that was planned ahead, only rows that `are_in_step` are given.
        """
        self._step_over()
        block_size, eos_token_ids = self.pool.block_size, self.eos_token_ids
        done = []
        for (request, num_tokens), token in zip(rows, sampled, strict=True):
            if request.is_cancelled:
                done.append(request)
                continue
            last = token
            if request.draft and token is not None:
                request.draft = ()
                num_tokens = 1 + len(token.after)  # what was computed behind that did not come
                *known, last = token, *token.after
                request.output_token_ids += [each.token_id for each in known]
            before = request.num_computed_tokens
            request.num_computed_tokens = before + num_tokens
            if before // block_size != (before + num_tokens) // block_size:
                self._publish_full_blocks(request, before)
                self.queues.pass_windows(request, request.num_computed_tokens)
            if self._states is not None:
                self._states.advanced(request)
            if token is None or last is None:
                if request.ends_with_prompt and request.num_uncomputed_tokens == 0:
                    request.lifecycle.first_token_s = now_s
                    request.finish_reason = FinishReason.LENGTH
                    done.append(request)
                continue
            sampling, output = request.sampling, request.output_token_ids
            output.append(last.token_id)
            if len(output) == 1:
                request.lifecycle.first_token_s = now_s
            # `finish` would find out as much, but is not called for tokens that cannot be the last.
            if (
                len(output) >= sampling.max_tokens
                or last.token_id in eos_token_ids
                or last.token_id in sampling.stop_token_ids
                or request.leg_token_limit is not None
            ):
                self._finish(request, token)
                if request.is_done:
                    done.append(request)
        for request in done:
            request.lifecycle.finished_s = now_s
        return done

    def accepted(
        self, rows: Sequence[Scheduled], sampled: list[SampledToken | None]
    ) -> list[SampledToken | None]:
        """Leave of each row's tokens those that it would have had without drafts: until one ends.

        A token was drawn as it is without drafts if all drafts before it are what was drawn there.
        To be called before `end_step`.
        """
        if not any(row.request.draft for row in rows):
            return sampled
        return [
            self._accepted(row.request, token) if token is not None and row.request.draft else token
            for row, token in zip(rows, sampled, strict=True)
        ]

    def abandon_step(
        self, rows: Sequence[Scheduled], failed: Sequence[Request], *, was_computed: bool = True
    ) -> None:
        """Drop a failed step: forget its failed requests and those cancelled while it ran.

        A step only reads its requests, so the others are unchanged, unless they have states: these
        may have gone on if it `was_computed`, so they are computed anew, in the blocks that they
        have, of which other nodes may have been told. A step that was planned ahead of its end is
        dropped, too: the device must be done with both.
        """
        gone = [request for request in self._in_step if request.is_cancelled]
        for row in rows:
            row.request.draft = ()
        self._in_step_ahead = set()
        self._step_over()
        if self._states is not None:
            for row in rows:
                self._states.failed(row.request)
        for request in {*failed, *gone}:
            self.forget(request)
        if self.pool.state_blocks and was_computed:
            for row in rows:
                row.request.num_computed_tokens = 0

    def forget(self, request: Request) -> None:
        """Remove a finished request and free its blocks, unless a step still uses them."""
        if request in self._in_step:
            self._in_step.discard(request)
            kept = [] if request.kept_state is None else request.kept_state[1]
            used = [*request.block_table, *request.state_blocks, *request.state_source, *kept]
            self.pool.retain(used)
            self._kept += used
        self._remove(request)
        # If it was cancelled meanwhile, its id may already belong to another request.
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]

    # ---- parts ---------------------------------------------------------------------------------

    def _is_in_step(self, request: Request) -> bool:
        return request in self._in_step or (
            self._beside is not None and request in self._beside._in_step
        )

    def _remove(self, request: Request) -> None:
        self.queues.remove(request)
        guesses, request.guesses = request.guesses, None
        if guesses is not None:
            guesses.ended(request)

    def _step_over(self) -> None:
        self._in_step, self._in_step_ahead = self._in_step_ahead, set()
        if self._kept:
            kept, self._kept = self._kept, []
            self.pool.release(kept)

    def _add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self.next_deadline_s = min(self.next_deadline_s, request.targets.deadline_s)

    def _accepted(self, request: Request, token: SampledToken) -> SampledToken:
        num_output, most = len(request.output_token_ids), request.leg_token_limit
        previous, kept = token, 0
        for draft, further in zip(request.draft, token.after, strict=True):
            num_output += 1
            if (
                previous.token_id != draft
                or further.token_id < 0  # none can be chosen: its own step says so
                or (most is not None and num_output >= most)
                or end_after(request, draft, num_output, self.eos_token_ids) is not None
            ):
                break
            previous, kept = further, kept + 1
        if request.guesses is not None:
            request.guesses.compared(len(request.draft), kept)
        refused = len(request.draft) - kept
        request.num_accepted += kept
        request.num_refused += refused
        return replace(token, after=token.after[:kept], refused=refused)

    def _finish(self, request: Request, token: SampledToken) -> None:
        """Finish the request if its newest token is its last; with token 1, also its siblings."""
        finish(request, self.eos_token_ids)
        for sibling, first in zip(request.siblings, token.siblings, strict=True):
            sibling.output_token_ids.append(first.token_id)
            finish(sibling, self.eos_token_ids)

    def _publish_full_blocks(self, request: Request, computed_before: int) -> None:
        """Publish newly full blocks to the prefix cache, those with output tokens included.

        Where decode nodes have weights of their own, none that these have made.
        """
        pool, num_tokens = self.pool, request.num_computed_tokens
        if request.num_by_prefill is not None:
            num_tokens = min(num_tokens, request.num_by_prefill)
        full_before = pool.full_blocks(computed_before)
        full = pool.full_blocks(num_tokens)
        request.extend_hashes(pool.tokens_in(full), pool.block_size)
        owner = request.prompt.owner
        for index in range(full_before, full):
            pool.publish(request.block_table[index], request.block_hashes[index], owner)
