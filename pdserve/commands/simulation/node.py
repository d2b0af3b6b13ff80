"""A node with a simulated model; the rest of its engine is real.

Queues, block pool and policy are the real ones. A step takes what the machine's costs say, times a
ratio drawn from the residuals. The node's own performance model may differ; it learns from its
steps. Preempted requests resume with what the prefix cache still holds, and compute the rest; there
is no host tier. Drafts are right as often as the machine says, and the real `Speculation` decides
which are computed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Protocol, cast

from msgspec.structs import replace

from decode_node.policies import DecodePolicy, interface, make_decode_policy
from decode_node.policies.decodes_first import DecodesFirst, MaxBatch, TpotCap
from decode_node.policies.interface import SideBySide
from decode_node.policies.static import Static
from pdserve.commands.simulation.beside import BesideSteps
from pdserve.commands.simulation.events import Events
from pdserve.commands.simulation.guesses import PlayedGuesses
from pdserve.commands.simulation.host import Host
from pdserve.commands.simulation.machine import Machine
from pdserve.commands.simulation.split import DECODE, PREFILL, Phase, SplitCores, Took
from pdserve.commands.simulation.step_times import (
    NO_SCATTER,
    REGIONS,
    Scatter,
    StepTimes,
    region_of,
)
from pdserve.commands.simulation.stride import Stride, advance_rows, most_steps, stops_of
from pdserve.commands.simulation.total import Total
from pdserve.engine.core import EngineCore
from pdserve.engine.drafts.speculation import Speculation
from pdserve.engine.interface import shape_of
from pdserve.engine.kv.shortage import Victims, make_headroom
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.measured.calibration import ServiceTimes
from pdserve.measured.perf_model import PerfModel, StepShape
from pdserve.node.role_policy import PrefillRolePolicy
from pdserve.protocol import NodeRole
from pdserve.rules.late import has_late_last
from pdserve.settings.config import HandoffConfig, PolicyConfig
from prefill_node.policies import make_prefill_policy

PINNED_LIMIT = HandoffConfig().pinned_limit


class World(Protocol):
    """The surroundings of a node: supplies sampled tokens, and is notified of every step."""

    def next_token(self, request: Request, num_later: int = 0) -> SampledToken:
        """Return the request's next token, or one that comes later."""
        ...

    def step_done(self, node: Node, sampled: Sequence[tuple[Request, SampledToken | None]]) -> None:
        """Note a finished step.

        Finished requests still have their blocks; BlockPool.retain keeps them longer.
        """
        ...

    def num_left(self, request: Request) -> int:
        """Return how many tokens the request still gets."""
        ...

    def silent_until_s(self, requests: Iterable[Request]) -> float:
        """Return until when nobody but their user has to hear of these requests' tokens.

        -inf: somebody has to before the next step begins.
        """
        ...

    def tell_due(self, requests: Iterable[Request], num_skipped: int) -> None:
        """Tell who has to hear of these requests' newest tokens by now.

        The tokens of the last `num_skipped` steps are told by `steps_skipped` only later.
        """
        ...

    def steps_skipped(self, requests: Iterable[Request], ends_s: Sequence[float]) -> None:
        """Note that each request got a token at each of these times."""
        ...


@dataclass(slots=True, eq=False)
class _Loop:
    """What computes one step after the other."""

    core: EngineCore
    phase: Phase = DECODE  # if it computes only one of two
    is_stepping: bool = False
    is_woken: bool = False  # a step may begin in one of the next events


class Node:
    """One engine over one pool, for either role; on cores that are split, one for each phase."""

    def __init__(
        self,
        name: str,
        role: NodeRole,
        machine: Machine,
        events: Events,
        policy: PolicyConfig,
        *,
        believed: PerfModel | None = None,
        scatter: Scatter = NO_SCATTER,
        host: Host | None = None,
        cores: SplitCores | None = None,
        victims: Victims | None = None,
        strides: bool = True,
    ) -> None:
        """Make an idle node.

        Args:
            believed: the initial performance model; by default the true one.
            scatter: draws a factor on each step's time.
            host: steps take longer beside those of other nodes of this host; by default its own.
            cores: if it computes both phases side by side; by default it has one step at a time.
            victims: the preemption rule; by default as `policy` says.
            strides: steps over unchanged batches, with the same results; without, it is slower.
        """
        self.name = name
        self.role = role
        self.machine = machine
        self.num_pinned_blocks = 0  # held for decode nodes to pull
        self.num_steps = 0
        self.busy_s = 0.0
        self.prompt_s = 0.0  # of this, for chunks of prompts; the rest is for decodes
        self.steps = {region: Total() for region in REGIONS}
        self.largest_batch = 0  # most requests that decoded in one step
        self.world: World | None = None
        self.perf = believed or (machine.perf() if cores is None else cores.perf)
        self.pool = machine.new_pool()
        self.scatter = scatter
        self.host = host or Host(name, events)
        self._cores = cores
        self._events = events
        decodes = role is NodeRole.DECODE
        self._times = StepTimes(machine.step_costs, scatter, decodes=decodes)
        self._stride: Stride | None = None
        self._joining: list[Request] = []  # adopted since the last step began
        clock, engine = events, machine.engine
        self.late_last = has_late_last(policy.prefill_policy)
        self.decode_policy: DecodePolicy = make_decode_policy(policy, engine, self.perf, clock)
        # What can be repeated: the policies that take all streams in every step.
        takes_all = isinstance(self.decode_policy, (TpotCap, MaxBatch, Static))
        repeats = strides and takes_all and not self.host.is_shared and cores is None
        has_plain_kv = not machine.windows and not machine.state_bytes
        repeats = repeats and not machine.drafts.share and has_plain_kv
        self._repeats = cast("DecodesFirst", self.decode_policy) if repeats else None
        most_pinned = int(self.pool.num_blocks * PINNED_LIMIT)
        num_kept_free = self.pool.num_blocks - most_pinned

        def num_pinned() -> int:
            return self.num_pinned_blocks

        prefill_policy = PrefillRolePolicy(
            make_prefill_policy(policy, engine, self.perf, clock, num_kept_free, num_pinned),
            self.decode_policy,
            num_pinned,
            most_pinned,
        )
        is_prefill = role is NodeRole.PREFILL
        queues = Queues(
            self.pool,
            clock,
            make_headroom(policy, self.pool),
            victims or Victims(),
        )
        self.core = EngineCore(
            queues, prefill_policy if is_prefill else self.decode_policy, frozenset()
        )
        if machine.drafts.share:
            guesses = PlayedGuesses(machine.drafts, name, self._token_id)
            most_rows = machine.max_batch_size
            self.core.speculate = Speculation(self.pool, self.perf.step_s, most_rows, [guesses])
        self._loops = [_Loop(self.core)]
        if cores is not None:
            assert isinstance(self.decode_policy, SideBySide), "all that are built in"
            self.core.policy = interface.StepPhase(self.decode_policy.plan_decodes)
            prompts = interface.StepPhase(self.decode_policy.plan_prompts)
            beside = EngineCore(queues, prompts, frozenset(), beside=self.core)
            self._loops.append(_Loop(beside, PREFILL))
        for loop in self._loops:
            self.host.join(loop, cores)
        self._beside = BesideSteps(events, self.host, self._loops[0])

    def submit(self, request: Request) -> None:
        """Submit a request, to be prefilled here."""
        self.interrupt()
        request.lifecycle.received_s = self._events.now_s
        self.core.submit(request)
        self.wake()

    def adopt(self, request: Request) -> None:
        """Adopt a request whose KV has arrived, to be decoded here."""
        self.interrupt()
        self.core.adopt(request)
        self._joining.append(request)
        self.wake()

    def pin(self, block_ids: list[int], num_bare: int) -> None:
        """Hold these blocks until they are pulled; of the first few no window sees anything."""
        self.pool.retain(block_ids, num_bare)
        self.num_pinned_blocks += len(block_ids)

    def unpin(self, block_ids: list[int], num_bare: int) -> None:
        """Release blocks that were pulled."""
        self.sync()
        self.num_pinned_blocks -= len(block_ids)
        self.pool.release(block_ids, num_bare)
        self.wake()

    def take_in(self, num_prompt: int, then: Callable[[], None]) -> None:
        """Do what is beside the steps for a prompt that is computed here, and call `then`."""
        self._serve(self.machine.services.prefill, num_prompt, then)

    def take_over(self, num_pulled: int, then: Callable[[], None]) -> None:
        """Do what is beside the steps for a prompt whose KV was pulled, and call `then`."""
        self._serve(self.machine.services.decode, num_pulled, then)

    def _serve(self, times: ServiceTimes, num_tokens: int, then: Callable[[], None]) -> None:
        seconds = times.request_s + times.prompt_token_s * num_tokens
        if not seconds:
            then()
            return
        self.interrupt()
        is_stepping = any(loop.is_stepping for loop in self._loops)
        self._beside.do(seconds, then, is_stepping=is_stepping)

    # ---- steps ---------------------------------------------------------------------------------

    def wake(self) -> None:
        """Begin a step in the next event, if there is work."""
        for loop in self._loops:
            if not loop.is_stepping and not loop.is_woken:
                loop.is_woken = True
                self._events.soon(partial(self._begin_step, loop))

    def _begin_step(self, loop: _Loop) -> None:
        loop.is_woken = False
        if loop.is_stepping:
            return  # a plan has released blocks, which wakes, too
        rows = self._planned(loop)
        if not rows:
            if self._cores is not None:
                self._cores.release(loop.phase)
            return
        loop.is_stepping = True
        for request in self._joining:
            request.lifecycle.joined_s = self._events.now_s
        self._joining.clear()
        shape = shape_of(rows)
        decodes = shape.decode_context and loop.phase == DECODE
        if decodes:
            num_drafts = sum([len(row.request.draft) for row in rows])
            self.largest_batch = max(self.largest_batch, shape.num_sampled - num_drafts)
        if self._repeats and shape.is_decode and self._is_steady(rows):
            stride = self._make_stride(rows, shape)
            if stride.last > 0:
                self._stride = stride
                self._arm(stride)
                return
            seconds = stride.seconds[0]
        else:
            seconds = self._times.draw_s(shape, beside=self.host.is_computing)
            seconds += self._beside.take_owed_s()
        ended = partial(self._end_step, loop, rows, shape)
        if self._cores is not None:
            self._cores.begin(loop, loop.phase, rows, shape, seconds, ended)
        elif self.host.is_shared:
            now_s = self._events.now
            began_s = now_s()
            self.host.begin(loop, shape, seconds, lambda: ended(Took(now_s() - began_s)))
        else:
            self._events.after(seconds, partial(ended, Took(seconds)))

    def _planned(self, loop: _Loop) -> list[Scheduled]:
        queues = self.core.queues
        if queues.is_empty:  # often, since many wake it: the policy is not asked
            queues.nothing_planned()
            return []
        return loop.core.begin_step()

    def _end_step(self, loop: _Loop, rows: list[Scheduled], shape: StepShape, took: Took) -> None:
        assert self.world is not None, "a node is alone in the world"
        loop.is_stepping = False
        self._took(loop, shape, took)
        tokens = [self._sampled(row.request) if row.samples else None for row in rows]
        tokens = loop.core.accepted(rows, tokens)
        done = loop.core.end_step(rows, tokens, self._events.now_s)
        requests = [row.request for row in rows]
        self.world.step_done(self, list(zip(requests, tokens, strict=True)))
        for request in done:
            loop.core.forget(request)
        self.wake()

    def _sampled(self, request: Request) -> SampledToken:
        assert self.world is not None
        token = self.world.next_token(request)
        if not request.draft:
            return token
        later = range(1, 1 + len(request.draft))
        return replace(token, after=tuple(self.world.next_token(request, n) for n in later))

    def _token_id(self, request: Request, num_later: int) -> int:
        assert self.world is not None
        return self.world.next_token(request, num_later).token_id

    def _took(self, loop: _Loop, shape: StepShape, took: Took) -> None:
        busy_s = took.seconds * took.share
        self.num_steps += 1
        self.busy_s += busy_s
        self.steps[region_of(shape)].add(took.seconds)
        of_prompts = loop.phase == PREFILL
        if of_prompts or shape.prefill_pairs:
            self.prompt_s += busy_s * (1.0 if of_prompts else self.perf.prompt_share(shape))
        if of_prompts and shape.is_decode:
            return  # prompts that came back and lack one token: no decodes, on other cores
        self.perf.observe(shape, took.seconds / took.slowdown, self._events.now_s)

    # ---- strides -------------------------------------------------------------------------------

    def sync(self) -> None:
        """Bring the node up to the present. Call this before looking at its state."""
        stride = self._stride
        if stride is not None:
            self._catch_up(stride, stride.num_over(self._events.now_s))

    def interrupt(self) -> None:
        """Bring the node up to the present, and have it plan anew after the step that runs now.

        Call this before changing its state from outside.
        """
        stride = self._stride
        if stride is None:
            return
        self.sync()
        if stride.num_done < stride.last:
            self.scatter.give_back("decode", stride.cut(stride.num_done + 1))
            self._arm(stride)

    def blocks_taken(self) -> None:
        """Have a stride go on with the blocks that are left, or do as `interrupt`.

        Call this after `sync` and after taking blocks for a request that is not in the queues yet.
        """
        stride = self._stride
        if stride is None:
            return
        requests = [row.request for row in stride.rows]
        num_left = stride.last - stride.num_done  # steps after the one that runs
        if self._is_line or most_steps(requests, self.pool) < num_left:
            self.interrupt()
            return
        stride.stops, stride.num_stopped = stops_of(stride, self.pool), 0
        self._arm(stride)

    @property
    def _is_line(self) -> bool:
        """Whether anybody waits, so that each step may begin with more than decodes."""
        queues = self.core.queues
        return bool(queues.waiting or queues.claims or queues.preemptions.away)

    def _is_steady(self, rows: Sequence[Scheduled]) -> bool:
        """Whether the next steps are like this one, until something happens."""
        is_whole = len(rows) == len(self.core.queues.running)
        # Beside streams that flow, the prefill policy plans (`PrefillRolePolicy`).
        return is_whole and not self._is_line and not rows[0].request.flows

    def _make_stride(self, rows: list[Scheduled], shape: StepShape) -> Stride:
        """Compute the times of steps with these rows, up to the first that does more."""
        assert self.world is not None
        requests = [row.request for row in rows]
        most = min(most_steps(requests, self.pool), min(map(self.world.num_left, requests)))
        seconds, factors = self._times.draw_decodes_s(shape, max(1, most))
        seconds[0] += self._beside.take_owed_s()
        stride = Stride.of(rows, shape, self._events.now_s, seconds, factors)
        silent_until_s = self.world.silent_until_s(requests)
        if silent_until_s == -inf:
            self.scatter.give_back("decode", stride.cut(1))
        stride.tells_at = bisect_left(stride.ends_s, silent_until_s)
        stride.stops = stops_of(stride, self.pool)
        return stride

    def _arm(self, stride: Stride) -> None:
        """Schedule the next stop."""
        stride.armed += 1
        at_s = stride.ends_s[stride.next_stop]
        self._events.at(at_s, partial(self._stop, stride, stride.armed))

    def _stop(self, stride: Stride, number: int) -> None:
        if self._stride is not stride or stride.armed != number:
            return  # it was interrupted
        index = stride.next_stop
        if index == stride.last:
            self._end_stride(stride)
            return
        if index == stride.stops[stride.num_stopped]:
            self._catch_up(stride, index + 1)
            stride.num_stopped += 1
        if index == stride.tells_at:
            assert self.world is not None
            requests = [row.request for row in stride.rows]
            self.world.tell_due(requests, index + 1 - stride.num_done)
            silent_until_s = self.world.silent_until_s(requests)
            stride.tells_at = bisect_left(stride.ends_s, silent_until_s, index + 1)
        self._arm(stride)

    def _end_stride(self, stride: Stride) -> None:
        """End the last step: briefly, where it is the last one of no row and nobody hears of it."""
        assert self.world is not None
        self._stride = None
        loop, num_left = self._loops[0], stride.last + 1 - stride.num_done
        requests = [row.request for row in stride.rows]
        if stride.tells_at > stride.last and min(map(self.world.num_left, requests)) > num_left:
            self._catch_up(stride, stride.last + 1)
            loop.is_stepping = False
            self.world.step_done(self, ())
            self.wake()
            return
        self._catch_up(stride, stride.last)
        took = Took(stride.seconds[stride.last])
        self._end_step(loop, stride.rows, stride.shape_at(stride.last), took)

    def _catch_up(self, stride: Stride, num_steps: int) -> None:
        """Do what the first `num_steps` steps do, and the plan of the one after them, if any."""
        assert self.world is not None
        first = stride.num_done
        if num_steps <= first:
            return
        stride.num_done = num_steps
        seconds, ends_s = stride.seconds[first:num_steps], stride.ends_s[first:num_steps]
        self.num_steps += len(seconds)
        for step_s in seconds:
            self.busy_s += step_s
        self.steps["decode"].add_each(seconds)
        predicted_s = self.perf.observe_decodes(stride.shape_at(first), seconds, ends_s[-1])
        planned = min(num_steps, stride.last) - first
        assert self._repeats is not None
        self._repeats.repeated(predicted_s[:planned])
        self.core.queues.preemptions.steps_planned(planned)
        advance_rows(stride, first, num_steps, self.pool)
        self.world.steps_skipped([row.request for row in stride.rows], ends_s)

    # ---- looks ---------------------------------------------------------------------------------

    def check_idle(self) -> None:
        """Assert that no request and no reference to a block is left."""
        assert not any(loop.is_stepping for loop in self._loops)
        assert self.core.num_requests == 0, f"{self.name}: requests were forgotten"
        assert self.num_pinned_blocks == 0, f"{self.name}: KV that nobody will pull"
        self.pool.check_integrity()
        assert self.pool.num_free == self.pool.num_blocks, f"{self.name}: blocks were lost"
