"""The loads of the pools, from node reports: how close they are to breaking promises.

While nothing is promised to anybody, loads are relative to usual latencies. Prompts then wait in
the coordinator's line rather than on the nodes, so the line counts as a queue of prefill nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import inf
from typing import Protocol, TypeAlias

from coordinator.admission.decisions import Reason
from coordinator.nodes.registry import KvReach, Member, Registry
from coordinator.pools.desired import PoolDemand, PromptDemand
from coordinator.pools.rebalancer import LATE, NodeLoad, pool_load
from coordinator.routing.router import NodeOutlook
from coordinator.routing.sides import USUAL_TPOT_S, USUAL_TTFT_S
from pdserve.measured.perf_model import PerfModel
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import NodeRole
from pdserve.shared.clock import Clock

KV_SHARE = 0.9  # share of a node's KV blocks in use beyond which streams preempt each other
_ROUNDS = 8  # of which each brings slower steps and longer stays closer to what they come to

# Nodes of a pool with the same transports have the same partners.
_Kind: TypeAlias = tuple[NodeRole, frozenset[KvReach]]
_REASONS: dict[NodeRole, Reason] = {NodeRole.PREFILL: "ttft", NodeRole.DECODE: "tpot"}


class Promises(Protocol):
    """The promises made to requests (`coordinator.admission`)."""

    @property
    def num_refused(self) -> Mapping[Reason, int]:
        """Number of refused requests by reason; the reasons include "ttft" and "tpot"."""
        ...

    def tightest(self, now_s: float) -> tuple[float, float] | None:
        """Return the shortest TTFT and TPOT promised to a class now; None if none is present."""
        ...

    def longest_wait_s(self, now_s: float) -> float:
        """Return for how long the oldest request in line has waited; 0 for none."""
        ...


class PoolLoads:
    """The loads of one coordinator's members, of which `outlook` says what is predicted."""

    def __init__(
        self,
        registry: Registry,
        promises: Promises,
        outlook: Callable[[Member], NodeOutlook],
        clock: Clock,
    ) -> None:
        self._registry = registry
        self._promises = promises
        self._outlook = outlook
        self._clock = clock
        self._num_refused = dict.fromkeys(NodeRole, 0)

    def watch(self, metrics: CoordinatorMetrics) -> None:
        """Register both pools' loads as metrics."""
        for role in NodeRole:
            metrics.watch(
                f"{role.name.lower()}_pool_load",
                "Mean load of its nodes; at 1 promises are just kept",
                partial(self.of, role),
            )

    def of(self, role: NodeRole) -> float:
        """Return a pool's load; 0 while it is unknown."""
        load = pool_load(self._look(frozenset()), role)
        return 0.0 if load is None or load == inf else load

    def look(self) -> list[NodeLoad]:
        """Return the loads of all attached nodes.

        A pool counts as late if requests were refused because of it since the last call, whatever
        its queues: refused requests are in no queue.
        """
        refused = {role: self._promises.num_refused.get(_REASONS[role], 0) for role in NodeRole}
        late = frozenset(role for role in NodeRole if refused[role] > self._num_refused[role])
        self._num_refused = refused
        return self._look(late)

    def demands(self, roles: Iterable[NodeRole]) -> dict[NodeRole, PoolDemand]:
        """Return what is asked of each of these pools."""
        now_s = self._clock.now()
        promised = self._promises.tightest(now_s)
        targets = promised or (USUAL_TTFT_S, USUAL_TPOT_S)
        in_line_s = 0.0 if promised else self._promises.longest_wait_s(now_s)
        return {role: self._demand(role, targets, in_line_s) for role in roles}

    def _demand(self, role: NodeRole, targets: tuple[float, float], in_line_s: float) -> PoolDemand:
        pool = [m for m in self._registry if m.role is role and not m.is_standby]
        ready = [
            (member, self._outlook(member))
            for member in pool
            if member.is_ready and member.perf is not None
        ]
        ttft_s, tpot_s = targets

        def load_with(number: float) -> float:
            spread = len(ready) / number
            if role is NodeRole.DECODE:
                return sum(
                    decode_load(member, tpot_s, spread, outlook.pace_share)
                    for member, outlook in ready
                ) / len(ready)
            return max(prompts.busy, prompts.queued_s / ttft_s) / number

        prompts = PromptDemand(
            busy=sum(member.load.busy_share for member, _ in ready),
            queued_s=sum(in_line_s + outlook.queue_s for _, outlook in ready),
            ttft_s=ttft_s,
        )
        is_prefill = role is NodeRole.PREFILL
        others = len(pool) - len(ready)
        return PoolDemand(len(ready), others, load_with, prompts if is_prefill else None)

    def _look(self, late: frozenset[NodeRole]) -> list[NodeLoad]:
        now_s = self._clock.now()
        promised = self._promises.tightest(now_s)
        ttft_s, tpot_s = promised or (USUAL_TTFT_S, USUAL_TPOT_S)
        in_line_s = 0.0 if promised else self._promises.longest_wait_s(now_s)
        indispensable = _indispensable(self._registry)
        nodes = []
        for member in self._registry:
            is_prefill = member.role is NodeRole.PREFILL
            load = None
            if member.is_ready and member.perf is not None:
                outlook = self._outlook(member)
                queued_s = in_line_s + outlook.queue_s
                load = (
                    queued_s / ttft_s
                    if is_prefill
                    else decode_load(member, tpot_s, pace_share=outlook.pace_share)
                )
                load = max(load, LATE) if member.role in late else load
            nodes.append(
                NodeLoad(
                    node_id=member.node_id,
                    role=member.role,
                    load=load,
                    left_over=_left_over(member),
                    may_turn=not member.hello.refusal(member.role.other)
                    and (member.role, member.reaches) not in indispensable,
                )
            )
        return nodes


def _indispensable(members: Iterable[Member]) -> set[_Kind]:
    """Return the kinds of nodes one of which cannot turn without parting the pools.

    That is: without leaving them no common transport, so that no KV could move any more.
    """
    kinds = Counter((m.role, m.reaches) for m in members if m.is_ready)
    if not _have_pair(kinds):
        return set()  # it can only get better
    turned = {
        (role, reaches): kinds - Counter([(role, reaches)]) + Counter([(role.other, reaches)])
        for role, reaches in kinds
    }
    return {kind for kind, after in turned.items() if not _have_pair(after)}


def _have_pair(kinds: Iterable[_Kind]) -> bool:
    """Return whether KV can move between the pools; an empty pool is not a matter of transports."""
    prefills, decodes = ([reaches for r, reaches in kinds if r is role] for role in NodeRole)
    if not prefills or not decodes:
        return True
    return any(not a.isdisjoint(b) for a in prefills for b in decodes)


def decode_load(
    member: Member, tpot_s: float, spread: float = 1.0, pace_share: float = 1.0
) -> float:
    """Return the load of a decode node: the larger of two ratios.

    The ratios are time per token / promised TPOT, and used blocks / KV_SHARE of all blocks. Both
    are predicted as if all waiting requests were running, and as if the node got `spread` times as
    many. Then each stays as much longer as its tokens take longer. The member's `perf` must be
    known.

    A token takes `pace_share` of its step's time, since steps give as many streams as run now more
    than one. Of further streams nothing is expected to be guessed: beside more, drafts are worth
    less.
    """
    perf, load, hello = member.perf, member.load, member.hello
    assert perf is not None
    now = load.running_requests + load.waiting_requests
    if now == 0:
        return 0.0
    model = PerfModel(perf.step, decode_ratio=load.decode_ratio or 1.0)
    blocks_each = (hello.num_blocks - load.free_blocks) / max(load.running_requests, 1)
    context_each = hello.layout.tokens_of_held(blocks_each * hello.layout.block_size)

    def token_s(num_requests: float) -> float:
        in_turns = max(num_requests / perf.max_batch_size, 1.0)
        context = num_requests * context_each / in_turns
        rows = max(1, round(num_requests / in_turns))
        num_guessed = min(load.running_requests or now, num_requests)
        tokens_a_step = 1 + (1 / pace_share - 1) * num_guessed / num_requests
        return model.decode_s(rows, round(context)) * in_turns / tokens_a_step

    num_requests = now * spread
    if spread != 1.0:
        begin_per_token = num_requests / token_s(now)
        for _ in range(_ROUNDS):
            num_requests = begin_per_token * token_s(num_requests)
    num_blocks = num_requests * blocks_each
    return max(token_s(num_requests) / tpot_s, num_blocks / hello.num_blocks / KV_SHARE)


def _left_over(member: Member) -> int:
    """Return the work left if the node changed pools: tokens to prefill, or requests to decode."""
    load = member.load
    if member.role is NodeRole.PREFILL:
        return load.queued_tokens
    return load.running_requests + load.waiting_requests
