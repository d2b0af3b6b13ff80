"""What a node's services share, over memory of a test's own, and both services on top of it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from kv_transfer.handshake import KvIdentity
from kv_transfer.memory import ExportedPool
from pdserve.commands.cli.node import SERVICES
from pdserve.engine.grammar import GrammarCompiler
from pdserve.grammar import Vocabulary
from pdserve.kv import KvLayout
from pdserve.node.assembly import ModelFacts, make_parts
from pdserve.node.roles import NodeParts
from pdserve.node.services import Services
from pdserve.protocol import NodeRole, NodeState
from pdserve.settings.config import NodeConfig
from pdserve.shared.errors import TokenizerError

VOCAB_SIZE = 1000


def made_parts(
    node_id: str,
    memory: ExportedPool,
    layout: KvLayout,
    config: NodeConfig,
    transports: Sequence[str] = ("tcp",),
) -> NodeParts:
    """The parts of a ready node; whoever asked for them closes `puller`, `exporter`, `memory`."""
    config = replace(config, node_id=node_id, transports=list(transports))
    model = ModelFacts(
        identity=KvIdentity("m", "r", layout),
        max_model_len=memory.num_blocks * layout.block_size,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset(),
        compiler=GrammarCompiler(_no_vocabulary),
    )
    return make_parts(config, NodeRole.PREFILL, model, memory, None, lambda: NodeState.READY)


def _no_vocabulary() -> Vocabulary:
    raise TokenizerError("these nodes have no tokenizer")


def made_services(parts: NodeParts, role: NodeRole) -> Services:
    """Both services of a node."""
    return Services(parts, SERVICES, role)
