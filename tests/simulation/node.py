"""A node with a simulated model; the rest of its engine is real.

Queues, block pool and policy are the real ones. A step takes what the machine's costs say (times
noise, if wanted). The node's own performance model may differ; it learns from its steps. Preempted
requests resume with what the prefix cache still holds, and compute the rest; there is no host tier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from decode_node.policies import DecodePolicy, make_decode_policy
from pdserve.engine.core import EngineCore
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.kv.headroom import make_headroom
from pdserve.engine.kv.victims import Victims
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.engine.steps.shape import shape_of
from pdserve.node.role_policy import PrefillRolePolicy
from pdserve.perf_model import PerfModel, StepShape
from pdserve.protocol import NodeRole
from pdserve.settings.config import HandoffConfig, PolicyConfig
from prefill_node.policies import make_prefill_policy
from tests.simulation.events import Events
from tests.simulation.host import Host
from tests.simulation.machines import Machine

PINNED_LIMIT = HandoffConfig().pinned_limit


class World(Protocol):
    """The surroundings of a node: supplies sampled tokens, and is notified of every step."""

    def next_token(self, request: Request) -> SampledToken:
        """Return the request's next token."""
        ...

    def step_done(self, node: Node, sampled: Sequence[tuple[Request, SampledToken | None]]) -> None:
        """Note a finished step.

        Finished requests still have their blocks; BlockPool.retain keeps them longer.
        """
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
        victims: Victims | None = None,
    ) -> None:
        """Make an idle node.

        Args:
            believed: the initial performance model; by default the true one.
            noise: draws a factor on each step's time.
            host: steps take longer beside those of other nodes of this host; by default its own.
            victims: the preemption rule; by default as `policy` says.
        """
        self.name = name
        self.role = role
        self.machine = machine
        self.num_pinned_blocks = 0  # held for decode nodes to pull
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
        queues = Queues(
            self.pool,
            clock,
            make_headroom(policy, self.pool),
            victims or Victims(policy.max_preemptions),
        )
        self.core = EngineCore(
            queues, prefill_policy if is_prefill else self.decode_policy, frozenset()
        )

    def submit(self, request: Request) -> None:
        """Submit a request, to be prefilled here."""
        self.core.submit(request)
        self.wake()

    def adopt(self, request: Request) -> None:
        """Adopt a request whose KV has arrived, to be decoded here."""
        self.core.adopt(request)
        self.wake()

    def pin(self, block_ids: list[int]) -> None:
        """Hold these blocks until they are pulled."""
        self.pool.retain(block_ids)
        self.num_pinned_blocks += len(block_ids)

    def unpin(self, block_ids: list[int]) -> None:
        """Release blocks that were pulled."""
        self.num_pinned_blocks -= len(block_ids)
        self.pool.release(block_ids)
        self.wake()

    # ---- steps ---------------------------------------------------------------------------------

    def wake(self) -> None:
        """Begin a step in the next event, if there is work."""
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
        self.perf.observe(shape, seconds, self._events.now_s)
        tokens = [self.world.next_token(row.request) if row.samples else None for row in rows]
        done = self.core.end_step(rows, tokens, self._events.now_s)
        requests = [row.request for row in rows]
        self.world.step_done(self, list(zip(requests, tokens, strict=True)))
        for request in done:
            self.core.forget(request)
        self.wake()

    # ---- looks ---------------------------------------------------------------------------------

    def check_idle(self) -> None:
        """Assert that no request and no reference to a block is left."""
        assert not self._is_stepping
        assert self.core.num_requests == 0, f"{self.name}: requests were forgotten"
        assert self.num_pinned_blocks == 0, f"{self.name}: KV that nobody will pull"
        self.pool.check_integrity()
        assert self.pool.num_free == self.pool.num_blocks, f"{self.name}: blocks were lost"
