"""A node whose model, and nothing else of its engine, is simulated.

Queues, block pool and policy are the real ones. A step takes what the machine's costs say (times
noise, if wanted), which is not always what the node believes: it learns by observing its steps.
Preempted requests come back by what the prefix cache still has of them and by computing the rest;
there is no host tier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from decode_node.policies import DecodePolicy, make_decode_policy
from pdserve.config import HandoffConfig, PolicyConfig
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.core import EngineCore
from pdserve.engine.kv_headroom import KvHeadroom
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.engine.step_shape import shape_of
from pdserve.engine.victims import Victims
from pdserve.node.role_policy import PrefillRolePolicy
from pdserve.perf_model import PerfModel, StepShape
from pdserve.protocol import NodeRole
from prefill_node.policies import make_prefill_policy
from tests.simulation.events import Events
from tests.simulation.host import Host
from tests.simulation.machines import Machine

PINNED_LIMIT = HandoffConfig().pinned_limit


class World(Protocol):
    """What a node is in: says what the model would sample, and hears of every step."""

    def next_token(self, request: Request) -> SampledToken:
        """The request's next token."""
        ...

    def step_done(self, node: Node, sampled: Sequence[tuple[Request, SampledToken | None]]) -> None:
        """Requests that are done still have their blocks; BlockPool.retain keeps them longer."""
        ...


class Node:
    """One engine over one pool, for either role."""

    def __init__(
        self,
        name: str,
        role: NodeRole,
        machine: Machine,
        events: Events,
        policy: PolicyConfig,
        *,
        believed: PerfModel | None = None,
        noise: Callable[[], float] = lambda: 1.0,
        host: Host | None = None,
    ) -> None:
        """`believed` is the profile to begin with (default: the truth); steps take `noise()` times
        what they should, and longer beside others of the host (default: one of its own)."""
        self.name = name
        self.role = role
        self.machine = machine
        self.num_pinned_blocks = 0  # held for others to pull
        self.num_steps = 0
        self.busy_s = 0.0
        self.world: World | None = None
        self.perf = believed or machine.perf()
        self.pool = BlockPool(machine.num_blocks, machine.block_size)
        self._events = events
        self._truth = machine.perf()
        self._noise = noise
        self.host = host or Host(name)
        self._is_stepping = False
        clock, engine = events.clock, machine.engine
        self.decode_policy: DecodePolicy = make_decode_policy(policy, engine, self.perf, clock)
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
        self.core = EngineCore(
            self.pool, prefill_policy if is_prefill else self.decode_policy, clock, frozenset()
        )
        queues, num_watermark = self.core.queues, int(policy.watermark * self.pool.num_blocks)
        queues.headroom = KvHeadroom(self.pool.block_size, policy.kv_headroom, num_watermark)
        queues.victims = Victims(policy.max_preemptions)

    def submit(self, request: Request) -> None:
        """Prefill it here."""
        self.core.submit(request)
        self.wake()

    def adopt(self, request: Request) -> None:
        """Decode it here: its KV has come."""
        self.core.adopt(request)
        self.wake()

    def pin(self, block_ids: list[int]) -> None:
        """Hold these blocks for somebody to pull."""
        self.pool.retain(block_ids)
        self.num_pinned_blocks += len(block_ids)

    def unpin(self, block_ids: list[int]) -> None:
        """They were pulled."""
        self.num_pinned_blocks -= len(block_ids)
        self.pool.release(block_ids)
        self.wake()

    # ---- steps ---------------------------------------------------------------------------------

    def wake(self) -> None:
        """There may be something to do."""
        self._events.after(0.0, self._begin_step)

    def _begin_step(self) -> None:
        if self._is_stepping:
            return
        rows = self.core.begin_step()
        if not rows:
            return
        self._is_stepping = True
        shape = shape_of(rows)
        seconds = self._truth.step_s(shape) * self._noise() * self.host.begin(self, shape)
        self._events.after(seconds, partial(self._end_step, rows, shape, seconds))

    def _end_step(self, rows: list[Scheduled], shape: StepShape, seconds: float) -> None:
        assert self.world is not None, "a node is alone in the world"
        self._is_stepping = False
        self.host.end(self)
        self.num_steps += 1
        self.busy_s += seconds
        self.perf.observe(shape, seconds)
        tokens = [self.world.next_token(row.request) if row.samples else None for row in rows]
        done = self.core.end_step(rows, tokens, self._events.now_s)
        requests = [row.request for row in rows]
        self.world.step_done(self, list(zip(requests, tokens, strict=True)))
        for request in done:
            self.core.forget(request)
        self.wake()

    # ---- looks ---------------------------------------------------------------------------------

    def check_idle(self) -> None:
        """Assert that nothing is left: no request, no reference to a block."""
        assert not self._is_stepping
        assert self.core.num_requests == 0, f"{self.name}: requests were forgotten"
        assert self.num_pinned_blocks == 0, f"{self.name}: KV that nobody will pull"
        self.pool.check_integrity()
        assert self.pool.num_free == self.pool.num_blocks, f"{self.name}: blocks were lost"
