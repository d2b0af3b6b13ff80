"""A machine to simulate: what one node of a cluster is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from pdserve.engine.kv.block_pool import BlockPool
from pdserve.kv import KvDtype, KvLayout
from pdserve.kv.companions import made_up
from pdserve.measured.calibration import Calibration, Drafts, Overheads, Region, Services
from pdserve.measured.perf_model import PerfModel
from pdserve.protocol import StepCosts, TransferCosts
from pdserve.settings.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Machine:
    """One node's hardware with one model on it."""

    costs: StepCosts  # what a node believes that its steps cost
    num_kv_tokens: int  # capacity of the block pool
    kv_token_bytes: int
    transfer: TransferCosts
    token_budget: int = 2048
    max_batch_size: int = 256
    block_size: int = 64
    windows: tuple[int, ...] = ()  # by which nodes give KV back, of each layer; (): they do not
    state_bytes: int = 0  # of a request, besides
    true_costs: Mapping[Region, StepCosts] | None = None  # None: as the node believes
    overheads: Overheads = field(default_factory=Overheads)
    services: Services = field(default_factory=Services)
    drafts: Drafts = field(default_factory=Drafts)
    quantisation: str = ""  # as `Calibration.quantisation`

    @classmethod
    def of(cls, calibration: Calibration) -> Machine:
        """Return the machine that was calibrated.

        Its nodes believe their profile, which is one formula for all steps, and correct it by what
        they see.
        """
        shape, limits = calibration.shape, calibration.limits
        return cls(
            costs=calibration.believed or calibration.mixed,
            num_kv_tokens=shape.layout.tokens_in(limits.num_blocks),
            kv_token_bytes=shape.layout.token_bytes,
            transfer=calibration.pull,
            token_budget=limits.token_budget,
            max_batch_size=limits.max_batch_size,
            block_size=shape.block_size,
            windows=shape.windows,
            state_bytes=shape.state_bytes,
            true_costs={
                "prefill": calibration.prefill,
                "decode": calibration.decode,
                "mixed": calibration.mixed,
            },
            overheads=calibration.overheads,
            services=calibration.services,
            drafts=calibration.drafts,
            quantisation=calibration.quantisation,
        )

    @property
    def num_blocks(self) -> int:
        """Blocks of a node's pool, companions not counted."""
        return self.layout.full_blocks(self.num_kv_tokens)

    @property
    def layout(self) -> KvLayout:
        """A layout with this machine's windows, and about its KV bytes per token."""
        layers = len(self.windows) or 1
        head_dim = max(1, self.kv_token_bytes // (2 * 2 * layers))  # K and V, two bytes each
        return KvLayout(
            layers,
            1,
            head_dim,
            self.block_size,
            KvDtype.BFLOAT16,
            windows=self.windows,
            state_bytes=self.state_bytes,
        )

    def new_pool(self) -> BlockPool:
        """The free blocks of a node."""
        layout = self.layout
        num_blocks = self.num_blocks * (1 + layout.num_companions)
        return BlockPool(
            num_blocks,
            self.block_size,
            windows=[window for window in self.windows if window],
            companions=made_up(num_blocks, layout.num_companions),
            state_blocks=layout.state_blocks,
        )

    def pulled_bytes(self, num_tokens: int, of_tokens: int) -> float:
        """Bytes of these tokens, of so many that are pulled: without what no window sees."""
        held = self.layout.held_tokens(of_tokens) / max(1, of_tokens)
        return num_tokens * held * self.kv_token_bytes

    @property
    def engine(self) -> EngineConfig:
        """The engine settings of a node on this machine."""
        return EngineConfig(
            block_size=self.block_size,
            token_budget=self.token_budget,
            max_batch_size=self.max_batch_size,
        )

    @property
    def step_costs(self) -> Mapping[Region, StepCosts]:
        """What the steps of each kind really cost."""
        everywhere: dict[Region, StepCosts] = {
            "prefill": self.costs,
            "decode": self.costs,
            "mixed": self.costs,
        }
        return self.true_costs or everywhere

    def perf(self, wrong_by: float = 1.0) -> PerfModel:
        """Return the model of a node profiled while it was `wrong_by` times slower than it is."""
        return PerfModel(scaled(self.costs, wrong_by))


def scaled(costs: StepCosts, factor: float) -> StepCosts:
    """Return these costs with all times multiplied by `factor`."""
    return msgspec.structs.replace(
        costs,
        knot_s=[factor * seconds for seconds in costs.knot_s],
        sampled_s=factor * costs.sampled_s,
        pair_s=factor * costs.pair_s,
        context_s=factor * costs.context_s,
    )
