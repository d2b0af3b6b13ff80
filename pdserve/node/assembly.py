"""Builds the parts that a node's two services share: one engine, one pool, one set of sessions."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial

from kv_transfer.exporter import Exporter
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.memory import KvPool
from kv_transfer.puller import Puller
from kv_transfer.tier import FileBlocks
from kv_transfer.transports.catalog import choose_kinds
from pdserve.clock import Clock, SystemClock
from pdserve.config import NodeConfig, PolicyConfig
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.engine import Engine
from pdserve.engine.kv_headroom import make_headroom
from pdserve.engine.preemption import Preemptions
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.engine.victims import Victims
from pdserve.metrics import NodeMetrics
from pdserve.node.grammar_queue import GrammarQueue
from pdserve.node.legs import Legs
from pdserve.node.prefixes.cost import PullCosts
from pdserve.node.prefixes.fetch import Fetched, PrefixFetcher
from pdserve.node.prefixes.headroom import Headroom, num_spoken_for
from pdserve.node.prefixes.host_tier import make_tier
from pdserve.node.prefixes.parts import FetchParts
from pdserve.node.prefixes.queue import PrefixQueue
from pdserve.node.reports.gauges import watch_preemptions, watch_prefix_fetches, watch_transfers
from pdserve.node.roles import NodeParts
from pdserve.node.sessions.client import Sessions
from pdserve.node.start.model import NodeModel, grammar_compiler
from pdserve.perf_model import PerfModel
from pdserve.protocol import NodeRole, NodeState


class NoPolicy:
    """The policy of an engine whose node has no role yet: it schedules nothing."""

    def plan(self, queues: Queues) -> list[Scheduled]:
        """As Policy.plan."""
        return []


def make_parts(
    config: NodeConfig,
    role: NodeRole,
    model: NodeModel,
    memory: KvPool,
    tier_blocks: FileBlocks | None,
    state: Callable[[], NodeState],
) -> NodeParts:
    """Build a node's parts over its KV memory; nothing runs yet. `role` only names the node."""
    node_id = config.node_id or f"{role.name.lower()}-{secrets.token_hex(3)}"
    incarnation = secrets.token_hex(8)
    clock = SystemClock()
    metrics = NodeMetrics()
    identity = KvIdentity(model.checkpoint.model_id, model.revision, model.layout)
    pool = _make_pool(config, model, memory)
    engine = make_engine(config.policy, pool, clock, model.config.eos_token_ids, metrics)
    exporter, puller = _make_transfer_ends(config, node_id, incarnation, identity, memory, clock)
    watch_transfers(metrics, exporter.statistics, puller.statistics)
    sessions = Sessions(node_id, incarnation, identity, puller, clock, config.timeouts)
    tier = make_tier(tier_blocks, model.layout, memory, pool)
    perf = PerfModel()  # a guess, until the node has profiled itself
    pull_costs = PullCosts(perf, config.engine.token_budget)
    headroom = Headroom(pool, partial(num_spoken_for, engine.queues))
    fetch_parts = FetchParts(
        pool=pool,
        identity=identity,
        puller=puller,
        sessions=sessions,
        tier=tier,
        pull_costs=pull_costs,
        clock=clock,
        headroom=headroom,
    )
    grammars = GrammarQueue(grammar_compiler(model), engine)
    prefixes = make_prefix_queue(config, fetch_parts, grammars.submit, metrics)
    recall_by(prefixes, engine.queues.preemptions)
    return NodeParts(
        config=config,
        node_id=node_id,
        incarnation=incarnation,
        clock=clock,
        pool=pool,
        engine=engine,
        legs=Legs(),
        sessions=sessions,
        grammars=grammars,
        prefixes=prefixes,
        max_model_len=model.max_model_len,
        vocab_size=model.config.vocab_size,
        identity=identity,
        exporter=exporter,
        puller=puller,
        metrics=metrics,
        state=state,
        perf=perf,
        pull_costs=pull_costs,
        headroom=headroom,
        tier=tier,
    )


def _make_pool(config: NodeConfig, model: NodeModel, memory: KvPool) -> BlockPool:
    """The blocks of the KV memory, whose generations change when a block is reused."""
    return BlockPool(
        model.num_blocks,
        model.layout.block_size,
        prefix_cache=config.engine.prefix_cache,
        bump_generations=memory.bump,
    )


def _make_transfer_ends(
    config: NodeConfig,
    node_id: str,
    incarnation: str,
    identity: KvIdentity,
    memory: KvPool,
    clock: Clock,
) -> tuple[Exporter, Puller]:
    """Both ends of the KV transfer, over the same pool and transports."""
    kinds = choose_kinds(config.transports, memory)
    exporter = Exporter(
        node_id,
        incarnation,
        identity,
        memory,
        clock,
        kinds,
        with_checksums=config.checksums,
        ticket_lifetime_s=config.timeouts.ticket_s,
    )
    puller = Puller(memory, identity, host_id(), kinds, name=f"{node_id}@{incarnation}")
    return exporter, puller


def make_engine(
    policy: PolicyConfig,
    pool: BlockPool,
    clock: Clock,
    eos_token_ids: frozenset[int],
    metrics: NodeMetrics,
) -> Engine:
    """The engine, whose queues follow the config."""
    headroom, victims = make_headroom(policy, pool), Victims(policy.max_preemptions)
    queues = Queues(pool, clock, headroom, victims)
    watch_preemptions(metrics, queues.preemptions.statistics)
    return Engine(queues, NoPolicy(), eos_token_ids)


def make_prefix_queue(
    config: NodeConfig,
    parts: FetchParts,
    submit: Callable[[Request], None],
    metrics: NodeMetrics,
) -> PrefixQueue:
    """The queue through which requests are submitted once their prefixes are fetched."""
    pull = config.prefix.prefix_pull if config.engine.prefix_cache else "never"
    fetcher = PrefixFetcher(parts, pull, config.timeouts.prefix_s)
    watch_prefix_fetches(metrics, fetcher.statistics)
    return PrefixQueue(fetcher, parts.pool.block_size, submit)


def recall_by(prefixes: PrefixQueue, preemptions: Preemptions) -> None:
    """Have `prefixes` fetch the KV of preempted requests, and count where it came from.

    Set up after both are made, since the queue submits requests to the engine that preempts them.
    """
    statistics = preemptions.statistics

    def recalled(fetched: Fetched) -> None:
        statistics.swapped_tokens += fetched.from_tier
        statistics.pulled_tokens += fetched.from_nodes

    preemptions.recall = lambda request: prefixes.recall(request, recalled)
