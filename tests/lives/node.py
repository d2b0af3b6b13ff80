"""A node's process: the real `pdserve.node.runtime.Node`, over fake KV and a played network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from kv_transfer.memory import ExportedPool
from pdserve.commands.cli.node import SERVICES
from pdserve.engine.plan.forms import FLOAT32, ActivationDtype
from pdserve.grammar import Vocabulary
from pdserve.node import runtime
from pdserve.node.planned import Planned
from pdserve.node.start.model import NodeModel
from pdserve.protocol import NodeRole
from pdserve.settings.config import NodeConfig
from pdserve.settings.models import NodeOfModel
from pdserve.shared.errors import TokenizerError
from tests.lives.adapters import LifeStore
from tests.lives.kv import EOS, LAYOUT, VOCAB_SIZE
from tests.lives.loop import Process, VirtualLoop
from tests.lives.machine import COSTS, LifeRunner, Machine

LOADING_S = 0.05


class Signals:
    """As `pdserve.shared.process.signals.StopSignals`; a life sends them."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()


class LifeNode(runtime.Node):
    """A node that loads no weights."""

    async def load(self) -> Any:
        """As Node.load."""
        await asyncio.sleep(LOADING_S)
        self._parts.perf.costs = COSTS
        self._perf_feed.tell()
        process = node_here()
        self._parts.adapters.begin(LifeStore(process.machine))
        assert isinstance(self._memory, ExportedPool)
        process.node = self
        return LifeRunner(self._memory, process.machine)


class NodeProcess(Process):
    """One incarnation of a node, from its start to its end."""

    def __init__(
        self,
        loop: VirtualLoop,
        config: NodeConfig,
        role: NodeRole,
        num_blocks: int,
        random: Random,
        kill: Callable[[NodeProcess, str], None],
    ) -> None:
        super().__init__(loop, config.node_id)
        self.node: LifeNode | None = None  # once it has loaded
        self.signals = Signals()
        is_device = int(config.node_id.removeprefix("n")) % 2 == 1  # every second one
        self.machine = Machine(random, lambda why: kill(self, why), is_device=is_device)
        self.num_blocks = num_blocks
        self._config = config
        self._role = role
        self._model = made_model(num_blocks)
        self.life: asyncio.Task[Any] | None = None

    def start(self, ended: Callable[[NodeProcess], None]) -> None:
        """Begin; `ended` is called when it has drained, or has ended itself."""
        self.life = self.spawn(
            runtime.live(
                Planned(NodeOfModel(self._config), self._role, self._model),
                None,  # type: ignore[arg-type]  # no cores
                SERVICES,
                self.signals,  # type: ignore[arg-type]
            )
        )
        self.life.add_done_callback(lambda _: ended(self))


def node_here() -> Any:
    """The node process that runs."""
    from tests.lives.loop import PROCESS

    return PROCESS.get()


def made_model(num_blocks: int) -> NodeModel:
    """What a node knows of its model before it loads it."""
    return NodeModel(
        checkpoint=SimpleNamespace(model_id="m", revision="r", path=None),  # type: ignore[arg-type]
        config=SimpleNamespace(  # type: ignore[arg-type]
            short_len=0,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset({EOS}),
            sliding_windows=(None,) * LAYOUT.num_layers,
        ),
        device=torch.device("cpu"),
        form=FLOAT32,
        activations=ActivationDtype.FLOAT32,
        layout=LAYOUT,
        num_blocks=num_blocks,
        max_model_len=num_blocks * LAYOUT.block_size,
    )


def no_vocabulary() -> Vocabulary:
    raise TokenizerError("these nodes have no tokenizer")
