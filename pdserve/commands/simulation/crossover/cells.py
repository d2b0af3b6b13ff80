"""The cells of the matrix: formats of weights and KV, with drafts and without."""

from __future__ import annotations

from typing import Final, Literal, get_args

import msgspec

from pdserve.settings.config import EngineConfig
from pdserve.settings.speculation import SpeculationConfig

Weights = Literal["bf16", "int8", "int4"]
Kv = Literal["bf16", "int8"]

_KV_MEMORY: Final = "512MiB"  # as of all nodes of `pdserve bench compare`


class Formats(msgspec.Struct, frozen=True):
    """How a node keeps weights and KV; only CPUs have all of them. Activations are bfloat16."""

    weights: Weights
    kv: Kv

    @property
    def name(self) -> str:
        """As in names of files: "int8-kv-bf16"."""
        return f"{self.weights}-kv-{self.kv}"

    def engine(self, base: EngineConfig) -> EngineConfig:
        """The settings of nodes with these formats: of one thread each, if `base` does not say."""
        is_auto = base.kv_memory == "auto"
        return msgspec.structs.replace(
            base,
            device="cpu",
            threads=max(1, base.threads),
            dtype="bfloat16",
            quantization="none" if self.weights == "bf16" else self.weights,
            kv_dtype="auto" if self.kv == "bf16" else self.kv,
            kv_memory=_KV_MEMORY if is_auto else base.kv_memory,
        )


class Cell(msgspec.Struct, frozen=True):
    """One cell."""

    formats: Formats
    drafts: bool

    @property
    def name(self) -> str:
        """As in names of files: "int8-kv-bf16-drafts"."""
        return f"{self.formats.name}-{'drafts' if self.drafts else 'plain'}"

    @property
    def speculation(self) -> SpeculationConfig:
        """Drafts are looked up in texts, which takes no time worth counting."""
        if not self.drafts:
            return SpeculationConfig(mode="off")
        return SpeculationConfig(sources=["text", "answers"])


FORMATS: Final = [Formats(weights, kv) for weights in get_args(Weights) for kv in get_args(Kv)]
CELLS: Final = [Cell(formats, drafts) for drafts in (False, True) for formats in FORMATS]
