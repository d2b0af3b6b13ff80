"""Mixtures of experts: which layers have one, and how it chooses. No torch here.

In such a layer a router scores each token for all experts, which are MLPs, and the token is the
weighted sum of what the best of them make of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from pdserve.engine.models.json_fields import JsonFields
from pdserve.shared.errors import ModelError

_MOST_EXPERTS: Final = 1_000


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a checkpoint calls the tensors of a layer: a matrix for each expert and each purpose."""

    block: str  # that has the router and `experts`
    gate: str
    up: str
    down: str
    shared_block: str = "shared_expert"
    scores: str = "gate"  # the router

    def router(self) -> str:
        """The router, within its layer and without ".weight"."""
        return f"{self.block}.{self.scores}"

    def score_bias(self) -> str:
        """See `Choice`, likewise."""
        return f"{self.router()}.e_score_correction_bias"

    def expert(self, number: int) -> tuple[str, str, str]:
        """Gate, up and down of an expert, likewise."""
        expert = f"{self.block}.experts.{number}"
        return f"{expert}.{self.gate}", f"{expert}.{self.up}", f"{expert}.{self.down}"

    def shared(self) -> tuple[str, str, str]:
        """Of the shared expert, likewise."""
        expert = f"{self.block}.{self.shared_block}"
        return f"{expert}.{self.gate}", f"{expert}.{self.up}", f"{expert}.{self.down}"

    def shared_gate(self) -> str:
        """What weighs that, likewise."""
        return f"{self.block}.shared_expert_gate"


class Scoring(StrEnum):
    """What becomes of the router's products."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class Choice:
    """How experts are chosen by their scores, and what these make of their weights."""

    scoring: Scoring = Scoring.SOFTMAX
    has_score_bias: bool = False  # added to scores where they are compared, and not to weights
    num_groups: int = 1  # of consecutive experts
    num_chosen_groups: int = 1  # only of these, experts are chosen
    best_of_group: int = 1  # a group's score is the sum of so many of its best
    weight_scale: float = 1.0  # of the weights


SOFTMAX: Final = Choice()


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """The mixtures of a model, which are all alike."""

    num_experts: int
    num_chosen: int  # experts of a token
    intermediate_size: int  # of each expert
    normalizes_weights: bool  # those of a token's experts add up to 1
    layers: frozenset[int]  # that have experts; the others have one MLP
    names: ExpertNames
    shared_size: int = 0  # width of one more, which all tokens have; 0: none
    weighs_shared: bool = True  # by a sigmoid
    choice: Choice = SOFTMAX
    has_bias: bool = False  # the router and each expert
    takes_turns: bool = False  # rows of gate and up do, where all experts are one parameter


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


def gpt_oss_experts(fields: JsonFields, num_layers: int) -> ExpertConfig:
    """Experts in all layers, with biases."""
    experts = _experts(
        fields,
        intermediate_size=fields.integer("intermediate_size"),
        normalizes_weights=True,
        layers=frozenset(range(num_layers)),
        names=ExpertNames("mlp", "gate_proj", "up_proj", "down_proj", scores="router"),
    )
    return replace(experts, has_bias=True, takes_turns=True)


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


def qwen3_next_experts(fields: JsonFields, num_layers: int) -> ExpertConfig | None:
    """As Qwen2's, but that there may be none, and weights add up to 1 unless config.json says."""
    if fields.raw("num_experts") == 0:
        return None
    normalizes_weights = fields.boolean("norm_topk_prob", True)
    return replace(qwen2_experts(fields, num_layers), normalizes_weights=normalizes_weights)


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


def deepseek_v2_experts(fields: JsonFields, num_layers: int) -> ExpertConfig:
    """Of groups, those with the best expert are chosen, or there are no groups."""
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.error("topk_method", "greedy or group_limited_greedy for this architecture")
    if fields.text("scoring_func", Scoring.SOFTMAX) != Scoring.SOFTMAX:
        raise fields.error("scoring_func", "softmax for this architecture")
    if fields.boolean("norm_topk_prob", False):  # libraries disagree about what it scales
        raise fields.error("norm_topk_prob", "false for this architecture")
    return _deepseek_experts(fields, num_layers, SOFTMAX, has_groups=method != "greedy")


def deepseek_v3_experts(fields: JsonFields, num_layers: int) -> ExpertConfig:
    """Of groups, those with the best two are chosen; all by scores with a bias."""
    if fields.text("topk_method", "noaux_tc") != "noaux_tc":
        raise fields.error("topk_method", "noaux_tc for this architecture")
    if fields.text("scoring_func", Scoring.SIGMOID) != Scoring.SIGMOID:
        raise fields.error("scoring_func", "sigmoid for this architecture")
    choice = Choice(Scoring.SIGMOID, has_score_bias=True, best_of_group=2)
    experts = _deepseek_experts(fields, num_layers, choice, has_groups=True)
    return replace(experts, normalizes_weights=fields.boolean("norm_topk_prob", True))


def _deepseek_experts(
    fields: JsonFields, num_layers: int, choice: Choice, *, has_groups: bool
) -> ExpertConfig:
    num_experts = fields.integer("n_routed_experts", maximum=_MOST_EXPERTS)
    num_chosen, width = fields.integer("num_experts_per_tok"), "moe_intermediate_size"
    num_groups = fields.integer("n_group") if has_groups else 1
    chosen_groups = fields.integer("topk_group") if has_groups else 1
    size = num_experts // num_groups
    if num_experts % num_groups or (num_groups > 1 and size < choice.best_of_group):
        raise fields.error(
            "n_group", f"a divisor of {num_experts}, with {choice.best_of_group} experts or more"
        )
    if chosen_groups > num_groups:
        raise fields.error("topk_group", f"at most {num_groups}, the number of groups")
    if num_chosen > size * chosen_groups:
        raise fields.error(
            "num_experts_per_tok", f"at most {size * chosen_groups}, those of the chosen groups"
        )
    if fields.integer("moe_layer_freq", 1) != 1:
        raise fields.error("moe_layer_freq", "1")
    return ExpertConfig(
        num_experts,
        num_chosen,
        fields.integer(width),
        normalizes_weights=False,
        layers=frozenset(range(fields.integer("first_k_dense_replace", minimum=0), num_layers)),
        names=ExpertNames("mlp", "gate_proj", "up_proj", "down_proj", "shared_experts"),
        shared_size=fields.integer(width) * fields.integer("n_shared_experts", minimum=0),
        weighs_shared=False,
        choice=replace(
            choice,
            num_groups=num_groups,
            num_chosen_groups=chosen_groups,
            weight_scale=fields.number("routed_scaling_factor", above=0.0),
        ),
    )
