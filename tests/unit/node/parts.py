"""What a node's services share, over memory of a test's own, and both services on top of it."""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.exporter import Exporter
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.memory import ExportedPool
from kv_transfer.puller import Puller
from kv_transfer.transports.catalog import TransportKind
from pdserve.cli.node import SERVICES
from pdserve.clock import SystemClock
from pdserve.config import NodeConfig
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.grammar import GrammarCompiler
from pdserve.errors import TokenizerError
from pdserve.grammar import Vocabulary
from pdserve.kv_layout import KvLayout
from pdserve.metrics import NodeMetrics
from pdserve.node.assembly import make_engine, make_prefix_queue, recall_by
from pdserve.node.grammar_queue import GrammarQueue
from pdserve.node.legs import Legs
from pdserve.node.prefixes.cost import PullCosts
from pdserve.node.prefixes.headroom import Headroom
from pdserve.node.prefixes.parts import FetchParts
from pdserve.node.roles import NodeParts
from pdserve.node.services import Services
from pdserve.node.sessions.client import Sessions
from pdserve.perf_model import PerfModel
from pdserve.protocol import NodeRole, NodeState

VOCAB_SIZE = 1000


def made_parts(
    node_id: str,
    memory: ExportedPool,
    layout: KvLayout,
    config: NodeConfig,
    kinds: Sequence[TransportKind] = (),
) -> NodeParts:
    """The parts of a ready node; whoever asked for them closes `puller`, `exporter`, `memory`."""
    identity = KvIdentity("m", "r", layout)
    clock = SystemClock()
    metrics = NodeMetrics()
    pool = BlockPool(memory.num_blocks, layout.block_size, bump_generations=memory.bump)
    engine = make_engine(config.policy, pool, clock, frozenset(), metrics)
    puller = Puller(memory, identity, host_id(), [])
    sessions = Sessions(node_id, "1", identity, puller, clock, config.timeouts)
    perf = PerfModel()
    pull_costs = PullCosts(perf, config.engine.token_budget)
    headroom = Headroom(pool, lambda: 0)
    fetch_parts = FetchParts(
        pool=pool,
        identity=identity,
        puller=puller,
        sessions=sessions,
        tier=None,
        pull_costs=pull_costs,
        clock=clock,
        headroom=headroom,
    )
    grammars = GrammarQueue(GrammarCompiler(_no_vocabulary), engine)
    prefixes = make_prefix_queue(config, fetch_parts, grammars.submit, metrics)
    recall_by(prefixes, engine.queues.preemptions)
    return NodeParts(
        config=config,
        node_id=node_id,
        incarnation="1",
        clock=clock,
        pool=pool,
        engine=engine,
        legs=Legs(),
        sessions=sessions,
        grammars=grammars,
        prefixes=prefixes,
        max_model_len=memory.num_blocks * layout.block_size,
        vocab_size=VOCAB_SIZE,
        identity=identity,
        exporter=Exporter(node_id, "1", identity, memory, clock, list(kinds)),
        puller=puller,
        metrics=metrics,
        state=lambda: NodeState.READY,
        perf=perf,
        pull_costs=pull_costs,
        headroom=headroom,
    )


def _no_vocabulary() -> Vocabulary:
    raise TokenizerError("these nodes have no tokenizer")


def made_services(parts: NodeParts, role: NodeRole) -> Services:
    """Both services of a node."""
    return Services(parts, SERVICES, role)
