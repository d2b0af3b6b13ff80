"""Config of `pdserve bench crossover`, and what it comes to. Light to import."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

from msgspec import Meta

from pdserve.commands.bench.checkpoints.shapes import SHAPES
from pdserve.settings.config import EngineConfig, Mode
from pdserve.settings.flag_groups import Groups
from pdserve.settings.struct import ConfigStruct
from pdserve.shared.errors import ConfigError

_FLAGS: Final[Groups] = {
    "what": ("model", "shape", "scenario"),
    "how long": ("quick", "predicted_only"),
    "results": ("out", "json"),
}
_MOST_HERE = 8  # nodes that are measured
_OF_CELLS: Final = (
    "dtype", "quantization", "prefill_quantization", "kv_dtype", "device", "tensor_parallel",
    "pipeline_parallel",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CrossoverPlan:
    """How much is predicted and measured."""

    sizes: tuple[int, ...]  # nodes of the clusters that are predicted, ascending
    here: int  # nodes that this machine has the cores for
    length_scale: float
    calibrate_s: float  # for each pair of formats
    requests: int  # of a simulated run
    close: float  # factor between the rates around a predicted goodput
    climbs: bool  # for each mode, else for disaggregated alone
    texts: int  # requests whose guessed tokens are counted
    measure_s: float  # for a cell, at most
    budget_s: float  # for everything, whatever that leaves for each cell; inf: no limit


class CrossoverConfig(ConfigStruct, frozen=True):
    """Weights in bf16, int8, int4; KV in bf16, int8; with drafts and without."""

    flag_groups = _FLAGS

    model: Annotated[
        str,
        Meta(description="checkpoint directory or hub id, which is sent text; empty: `shape`"),
    ] = ""
    shape: Annotated[
        str,
        Meta(
            description=f"shape of random weights: {', '.join(SHAPES)}; they say nothing that can "
            "be guessed, so drafts are predicted as of the demo model, and not measured"
        ),
    ] = "50m"
    scenario: Annotated[
        Literal["long-prompts", "short-prompts", "conversation"],
        Meta(description="a mixture of requests, as in bench compare"),
    ] = "long-prompts"
    quick: Annotated[
        bool,
        Meta(
            description="half an hour on two cores for a shape: lengths are a quarter, "
            "calibrations take 30 s, fewer sizes of clusters and requests"
        ),
    ] = False
    predicted_only: Annotated[
        bool, Meta(description="start no clusters but for calibrations; the rest may follow later")
    ] = False
    out: Annotated[
        str,
        Meta(
            description="directory of the results, where a run that was stopped goes on; empty: "
            "bench-crossover/ and what is asked"
        ),
    ] = ""
    json: Annotated[bool, Meta(description="print JSON")] = False
    engine: EngineConfig = EngineConfig()

    @property
    def plan(self) -> CrossoverPlan:
        """How much of it.

        Raises:
            ConfigError: there is no such shape, or what cells decide by themselves is given.
        """
        if self.shape not in SHAPES:
            raise ConfigError(f'--shape "{self.shape}": there are {", ".join(SHAPES)}')
        for name in _OF_CELLS:
            if getattr(self.engine, name) != getattr(EngineConfig(), name):
                raise ConfigError(
                    f"engine.{name}: cells have formats of their own, on one process of a CPU a "
                    "node; leave it out"
                )
        num_nodes = len(os.sched_getaffinity(0)) // max(1, self.engine.threads)
        here = min(_MOST_HERE, max(2, num_nodes))
        if self.quick:
            return CrossoverPlan(
                sizes=(8,), here=here, length_scale=0.25, calibrate_s=30.0, requests=130,
                close=1.08, climbs=False, texts=13, measure_s=300.0, budget_s=1740.0,
            )  # fmt: skip
        return CrossoverPlan(
            sizes=(2, 4, 8), here=here, length_scale=1.0, calibrate_s=160.0,
            requests=260, close=1.05, climbs=True, texts=39, measure_s=900.0,
            budget_s=float("inf"),
        )  # fmt: skip

    @property
    def folder(self) -> Path:
        """Where the results go: the same for the same question."""
        if self.out:
            return Path(self.out)
        model = Path(self.model).name or self.shape
        return Path("bench-crossover") / f"{model}-{self.scenario}{'-quick' * self.quick}"


MODES: Final[tuple[Mode, ...]] = get_args(Mode)
