"""Layers behind the model's own that predict a token further each (MTP), as checkpoints have them.

model.layers.N.   and so on, with N layers in the model, beside what a layer of the model has:
  embed_tokens    the embedding again; else it is the model's
  enorm, hnorm    norms of a token's embedding, and of the last state of what is before the layer
  eh_proj         [hidden, 2 * hidden], of both side by side
  shared_head.    norm and head: the model's final norm and lm_head again
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from pdserve.engine.models.config import ModelConfig
from pdserve.engine.plan.forms import WeightForm, fitting_form
from pdserve.engine.plan.layer import layer_plan
from pdserve.engine.plan.matrix import Matrix, Part
from pdserve.engine.plan.model import EMBEDDING, ModelPlan
from pdserve.engine.plan.norm import Norm
from pdserve.engine.ranks.shard import WHOLE
from pdserve.model_files.coding import Coding


@dataclass(frozen=True, slots=True)
class FurtherLayer(ModelPlan):
    """One such layer, as a model of one layer, which has another entrance."""

    @classmethod
    def behind(
        cls,
        config: ModelConfig,
        index: int,
        stored: Collection[str],
        form: WeightForm,
        codings: Mapping[str, Coding],
    ) -> FurtherLayer:
        """Plan it.

        Args:
            config: of the model that it belongs to.
            index: of the layer, among those behind the model's own.
            stored: names of all tensors in the checkpoint.
            form: of matrices.
            codings: of tensors that are kept as they are stored.
        """
        number, hidden = config.num_layers + index, config.hidden_size
        prefix, tokens = f"model.layers.{number}.", range(config.vocab_size)
        embedding = f"{prefix}embed_tokens"
        head = Matrix(
            f"{prefix}head",
            (Part(f"{prefix}shared_head.head", tokens),),
            range(hidden),
            fitting_form(form, hidden, is_head=True),
        )
        return cls(
            _alone(config),
            WHOLE,
            form,
            Part(embedding if f"{embedding}.weight" in stored else EMBEDDING, tokens),
            (layer_plan(_with_further(config, number), number, WHOLE, form).coded(codings),),
            Norm(f"{prefix}shared_head.norm.weight", hidden, is_wide=config.has_wide_norms),
            head.coded(codings),
        )

    @property
    def prefix(self) -> str:
        """How the names of its tensors begin."""
        assert self.lm_head is not None, "as planned"
        return self.lm_head.name.removesuffix("head")

    @property
    def part_name(self) -> str:
        """As ModelPlan."""
        return self.prefix.removeprefix("model.").rstrip(".")

    def entrance(self) -> dict[str, tuple[int, ...]]:
        """Name |-> shape of the tensors that make a row of the residual stream."""
        hidden = self.config.hidden_size
        return {
            f"{self.prefix}enorm.weight": (hidden,),
            f"{self.prefix}hnorm.weight": (hidden,),
            f"{self.prefix}eh_proj.weight": (hidden, 2 * hidden),
        }

    def whole(self) -> ModelPlan:
        """As ModelPlan."""
        return self

    def ignored(self) -> tuple[str, ...]:
        """As ModelPlan: all that is the model's own."""
        return "model.", "lm_head."


def _with_further(config: ModelConfig, number: int) -> ModelConfig:
    """The model with all layers to that one, which are as its last one."""
    experts, further = config.experts, number + 1 - config.num_layers
    if experts is not None:
        experts = replace(experts, layers=experts.layers | {number})
    return replace(
        config,
        num_layers=number + 1,
        sliding_windows=(*config.sliding_windows, *config.sliding_windows[-1:] * further),
        ropes=(*config.ropes, *config.ropes[-1:] * further),
        experts=experts,
    )


def _alone(config: ModelConfig) -> ModelConfig:
    """A model that has it only."""
    experts = config.experts
    return replace(
        config,
        num_layers=1,
        sliding_windows=config.sliding_windows[-1:],
        ropes=config.ropes[-1:],
        experts=None if experts is None else replace(experts, layers=frozenset({0})),
        num_further_layers=0,
        ties_embeddings=False,
    )
