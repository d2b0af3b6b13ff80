"""Mixtures of experts: which layers have one, and how it chooses. No torch here.

In such a layer a router scores each token for all experts, which are MLPs, and the token is the
weighted sum of what the best of them make of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from pdserve.engine.models.json_fields import JsonFields
from pdserve.shared.errors import ModelError

_MOST_EXPERTS: Final = 1_000


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a checkpoint calls the tensors of a layer: a matrix for each expert and each purpose."""

    block: str  # that has `gate`, the router, and `experts`
    gate: str
    up: str
    down: str

    def router(self) -> str:
        """The router, within its layer and without ".weight"."""
        return f"{self.block}.gate"

    def expert(self, number: int) -> tuple[str, str, str]:
        """Gate, up and down of an expert, likewise."""
        expert = f"{self.block}.experts.{number}"
        return f"{expert}.{self.gate}", f"{expert}.{self.up}", f"{expert}.{self.down}"

    def shared(self) -> tuple[str, str, str]:
        """Of the shared expert, likewise."""
        expert = f"{self.block}.shared_expert"
        return f"{expert}.{self.gate}", f"{expert}.{self.up}", f"{expert}.{self.down}"

    def shared_gate(self) -> str:
        """What weighs that, likewise."""
        return f"{self.block}.shared_expert_gate"


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """The mixtures of a model, which are all alike."""

    num_experts: int
    num_chosen: int  # experts of a token
    intermediate_size: int  # of each expert
    normalizes_weights: bool  # those of a token's experts add up to 1
    layers: frozenset[int]  # that have experts; the others have one MLP
    names: ExpertNames
    shared_size: int = 0  # width of one more, which all tokens have, weighed by a sigmoid; 0: none


def no_experts(fields: JsonFields, num_layers: int) -> ExpertConfig | None:
    """Raises ModelError: config.json asks for experts, which this architecture does not have."""
    for key in ("num_experts", "num_local_experts"):
        if fields.raw(key) not in (None, 0, 1):
            raise ModelError(
                f"{fields.where}: {key} is {fields.raw(key)!r}, and this architecture has no "
                "experts"
            )
    return None


def mixtral_experts(fields: JsonFields, num_layers: int) -> ExpertConfig:
    """Experts in all layers, of the width intermediate_size."""
    return _experts(
        fields,
        intermediate_size=fields.integer("intermediate_size"),
        normalizes_weights=True,
        layers=frozenset(range(num_layers)),
        names=ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2"),
    )


def qwen3_experts(fields: JsonFields, num_layers: int) -> ExpertConfig:
    """Experts in every decoder_sparse_step-th layer, but for mlp_only_layers."""
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.integers("mlp_only_layers") or []
    return _experts(
        fields,
        intermediate_size=fields.integer("moe_intermediate_size"),
        normalizes_weights=fields.boolean("norm_topk_prob", False),
        layers=frozenset(n for n in range(num_layers) if (n + 1) % step == 0 and n not in dense),
        names=ExpertNames("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    )


def qwen2_experts(fields: JsonFields, num_layers: int) -> ExpertConfig:
    """As Qwen3's, and a shared one."""
    shared = fields.integer("shared_expert_intermediate_size")
    return replace(qwen3_experts(fields, num_layers), shared_size=shared)


def _experts(
    fields: JsonFields,
    *,
    intermediate_size: int,
    normalizes_weights: bool,
    layers: frozenset[int],
    names: ExpertNames,
) -> ExpertConfig:
    # transformers 5 writes num_local_experts for all, and older checkpoints of Qwen3 num_experts.
    keys = [key for key in ("num_local_experts", "num_experts") if key in fields]
    num_experts = fields.integer(keys[0] if keys else "num_experts", maximum=_MOST_EXPERTS)
    if fields.integer(keys[-1] if keys else "num_experts") != num_experts:
        raise fields.error("num_experts", f"{num_experts}, as num_local_experts")
    num_chosen = fields.integer("num_experts_per_tok")
    if num_chosen > num_experts:
        raise fields.error("num_experts_per_tok", f"at most {num_experts}, the number of experts")
    return ExpertConfig(
        num_experts, num_chosen, intermediate_size, normalizes_weights, layers, names
    )
