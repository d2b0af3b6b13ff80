"""Builds the parts that a node's two services share: one engine, one pool, one set of sessions."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kv_transfer.exporter import Exporter, SpreadPool, TicketRules
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.hosts.far_host import FarHost
from kv_transfer.memory import KvPool
from kv_transfer.puller import Puller
from kv_transfer.transports.catalog import choose_kinds
from kv_transfer.transports.tls import NodeTls
from pdserve.engine.adapters.store import Adapters
from pdserve.engine.core import Awaits
from pdserve.engine.drafts.heads.head import Head
from pdserve.engine.drafts.heads.source import HeadSource
from pdserve.engine.drafts.model.draft_model import DraftModel
from pdserve.engine.drafts.model.source import ModelSource
from pdserve.engine.drafts.speculation import Speculation
from pdserve.engine.drafts.texts import FormerAnswers, OwnText, Predictions, Texts
from pdserve.engine.engine import Engine
from pdserve.engine.grammar import GrammarCompiler
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.kv.shared_pool import Budget, SharedPool
from pdserve.engine.kv.shortage import CouldFetch, Victims, make_headroom
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.request import Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.kv.companions import Companions, made_up
from pdserve.measured.perf_model import PerfModel
from pdserve.metrics import NodeMetrics
from pdserve.model_files.checkpoint import Checkpoint
from pdserve.node.adapters import NodeAdapters
from pdserve.node.legs import Legs
from pdserve.node.prefixes.cost import PrefixWorth, PullCosts
from pdserve.node.prefixes.fetch import PrefixFetcher
from pdserve.node.prefixes.headroom import Headroom, num_spoken_for
from pdserve.node.prefixes.host_tier import TierBlocks, make_tier
from pdserve.node.prefixes.offers import FetchParts, PrefixOffers
from pdserve.node.prefixes.store.node_store import make_store
from pdserve.node.preparation import Preparation
from pdserve.node.reports.gauges import (
    watch_draft_texts,
    watch_drafts,
    watch_preemptions,
    watch_prefix_fetches,
    watch_transfers,
)
from pdserve.node.roles import NodeParts
from pdserve.node.sessions.client import Sessions
from pdserve.node.start.model import NodeModel, grammar_compiler
from pdserve.protocol import NodeRole, NodeState
from pdserve.settings.config import EngineConfig, NodeConfig, PolicyConfig
from pdserve.settings.speculation import asks, no_drafts
from pdserve.settings.values import parse_bytes
from pdserve.shared.clock import Clock, SystemClock
from pdserve.shared.simulated_link import link_between, parse_link
from pdserve.wire.security import Security


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a node's parts know of its model."""

    identity: KvIdentity
    max_model_len: int  # prompt and output tokens
    vocab_size: int
    eos_token_ids: frozenset[int]
    compiler: GrammarCompiler
    short_len: int = 0  # as NodeHello
    bound_to: NodeRole | None = None  # as NodeParts

    @classmethod
    def of(cls, model: NodeModel) -> ModelFacts:
        """As planned; its vocabulary is loaded later."""
        return cls(
            identity=KvIdentity(
                model.checkpoint.model_id,
                model.revision,
                model.layout,
                model.share.parallelism.pipeline,
                model.config.sliding_windows,
            ),
            max_model_len=model.max_model_len,
            vocab_size=model.config.vocab_size,
            eos_token_ids=model.config.eos_token_ids,
            compiler=grammar_compiler(model),
            short_len=model.config.short_len,
            bound_to=None if model.precision is None else model.precision.role,
        )


class NoPolicy:
    """The policy of an engine whose node has no role yet: it schedules nothing."""

    def plan(self, queues: Queues) -> list[Scheduled]:
        """As Policy.plan."""
        return []


def make_parts(
    config: NodeConfig,
    role: NodeRole,
    model: ModelFacts,
    memory: KvPool,
    tier_blocks: TierBlocks | None,
    state: Callable[[], NodeState],
    hosts: Sequence[FarHost] = (),
    budget: Budget | None = None,
) -> NodeParts:
    """Build a node's parts over its KV memory; nothing runs yet.

    `role` only names the node. `hosts` have the parts of the memory that are not here. With a
    `budget`, blocks have memory only while they are used.
    """
    node_id = config.node_id or f"{role.name.lower()}-{secrets.token_hex(3)}"
    incarnation = secrets.token_hex(8)
    clock, metrics, identity = SystemClock(), NodeMetrics(), model.identity
    companions = made_up(memory.num_blocks, identity.layout.num_companions)
    exporter, puller = _make_transfer_ends(
        config, node_id, incarnation, identity, memory, clock, hosts, companions
    )
    watch_transfers(metrics, exporter.statistics, puller.statistics)
    security = Security.of(config.security)
    sessions = Sessions(
        node_id, incarnation, identity, puller, clock, config.timeouts, security=security
    )
    pool = (BlockPool if budget is None else partial(SharedPool, budget=budget))(
        memory.num_blocks,
        identity.layout.block_size,
        prefix_cache=config.engine.prefix_cache,
        bump_generations=memory.bump,
        windows=[window for window in identity.windows if window],
        companions=companions,
        state_blocks=identity.layout.state_blocks,
    )
    tier = make_tier(tier_blocks, memory, pool, hosts)
    pull = config.prefix.prefix_pull if config.engine.prefix_cache else "never"
    perf = PerfModel()  # a guess, until the node has profiled itself
    pull_costs = PullCosts(perf, config.engine.token_budget)
    worth = PrefixWorth(pull_costs, identity.layout, clock, pull)
    store = make_store(config.prefix, tier, pool, identity.fingerprint, worth)
    offers = PrefixOffers(pool, sessions, tier, pull, store)
    engine = _make_engine(
        config.policy,
        pool,
        clock,
        model,
        metrics,
        lambda request: request.is_of_two_weights or offers.has_kv_of(request),
    )
    kinds: list[Texts] = [Predictions(), OwnText(), FormerAnswers()]
    texts = [kind for kind in kinds if asks(config.speculation, kind.name)]
    speculation = Speculation(pool, perf.step_s, config.engine.max_batch_size, texts)
    watch_drafts(metrics, speculation)
    watch_draft_texts(metrics, texts)
    silent = no_drafts(config.speculation, has_states=identity.layout.state_bytes > 0)
    if not silent:
        engine.speculate, engine.awaits = speculation, speculation.awaits
    fetch_parts = FetchParts(
        pool=pool,
        identity=identity,
        puller=puller,
        sessions=sessions,
        tier=tier,
        pull_costs=pull_costs,
        clock=clock,
        headroom=Headroom(pool, partial(num_spoken_for, engine.queues)),
        store=store,
    )
    prefix_s = config.timeouts.prefix_s
    fetcher = PrefixFetcher(fetch_parts, offers, prefix_s, config.timeouts.hold_s)
    watch_prefix_fetches(metrics, fetcher.statistics)
    legs, prompt_engine = Legs(), _engine_beside(engine) if config.multiplexed else None
    return NodeParts(
        config=config,
        node_id=node_id,
        incarnation=incarnation,
        clock=clock,
        pool=pool,
        engine=engine,
        legs=legs,
        adapters=NodeAdapters(
            legs,
            config.engine.max_adapters,
            parse_bytes(config.engine.adapter_memory),
            partial(_steps_done, engine, prompt_engine),
        ),
        sessions=sessions,
        preparation=Preparation(fetcher, model.compiler, engine),
        max_model_len=model.max_model_len,
        short_len=model.short_len,
        no_drafts=silent,
        vocab_size=model.vocab_size,
        identity=identity,
        exporter=exporter,
        puller=puller,
        metrics=metrics,
        state=state,
        perf=perf,
        pull_costs=fetch_parts.pull_costs,
        headroom=fetch_parts.headroom,
        speculation=speculation,
        tier=tier,
        store=store,
        prompt_engine=prompt_engine,
        bound_to=model.bound_to,
    )


def use_loaded(
    parts: NodeParts, runner: ModelRunner, checkpoint: Checkpoint, draft: DraftModel | Head | None
) -> None:
    """Have the engine wait for masks of grammars, and drafts follow them and a draft model.

    Adapters of the checkpoint's model can be loaded from now on.
    """
    runner.kv_cache.companions = parts.pool.companions
    parts.adapters.begin(_adapter_store(runner.model, checkpoint, parts.config.engine))
    engine, config, step_s = parts.engine, parts.config, parts.perf.step_s
    engine.hold = partial(runner.grammars.hold, wake=engine.wake)
    parts.speculation.follow(runner.grammars, forces=asks(config.speculation, "grammar"))
    if draft is None:
        return
    source: ModelSource | HeadSource
    if isinstance(draft, DraftModel):
        source = ModelSource(draft, engine.queues, step_s, config.engine.token_budget)
    else:
        source = HeadSource(draft, runner, engine.queues, step_s)
    engine.awaits = _either(engine.awaits, source.awaits)
    parts.speculation.add(source, source.work)
    engine.draft = source.plan


def _either(one: Awaits, other: Awaits) -> Awaits:
    return lambda rows, gap_s: one(rows, gap_s) or other(rows, gap_s)


def _make_transfer_ends(
    config: NodeConfig,
    node_id: str,
    incarnation: str,
    identity: KvIdentity,
    memory: KvPool,
    clock: Clock,
    hosts: Sequence[FarHost],
    companions: Companions | None,
) -> tuple[Exporter, Puller]:
    """Both ends of the KV transfer, over the same pool and transports."""
    kinds = choose_kinds(config.transports, memory)
    tls = NodeTls(Path(config.security.tls_dir)) if config.security.tls_dir else None
    exporter = Exporter(
        node_id,
        incarnation,
        identity,
        memory,
        clock,
        kinds,
        tickets=TicketRules(config.timeouts.ticket_s, config.checksums),
        tls=tls,
        spread=SpreadPool(hosts),
        companions=companions,
    )
    links = [parse_link(text) for text in config.handoff.links]
    puller = Puller(
        memory,
        identity,
        host_id(),
        kinds,
        name=f"{node_id}@{incarnation}",
        simulated=lambda exporter: link_between(links, exporter, node_id),
        tls=tls,
        hosts=hosts,
        companions=companions,
    )
    return exporter, puller


def _make_engine(
    policy: PolicyConfig,
    pool: BlockPool,
    clock: Clock,
    model: ModelFacts,
    metrics: NodeMetrics,
    could_fetch: CouldFetch,
) -> Engine:
    """The engine, whose queues follow the config."""
    headroom, victims = make_headroom(policy, pool), Victims()
    queues = Queues(pool, clock, headroom, victims, could_fetch)
    watch_preemptions(metrics, queues.preemptions.statistics)
    return Engine(queues, NoPolicy(), model.eos_token_ids)


def _adapter_store(model: Decoder, checkpoint: Checkpoint, engine: EngineConfig) -> Adapters:
    """Return the adapters of a model, with room for one that others then leave for."""
    most_bytes = 2 * parse_bytes(engine.adapter_memory)
    return Adapters(ModelPlan.of(model.config), model, most_bytes, checkpoint)


async def _steps_done(*engines: Engine | None) -> None:
    """Wait for the steps that are under way, and those that follow them already."""
    for engine in engines:
        if engine is not None:
            await engine.in_thread(lambda: None)


def _engine_beside(engine: Engine) -> Engine:
    return Engine(engine.queues, NoPolicy(), engine.eos_token_ids, beside=engine)
