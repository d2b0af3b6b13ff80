"""Plans of models for tests, which name a type as torch does."""

from __future__ import annotations

import torch

from pdserve.engine.models.config import ModelConfig
from pdserve.engine.plan.forms import FORMS, ActivationDtype
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.ranks.shard import WHOLE, Shard


def activations(dtype: torch.dtype) -> ActivationDtype:
    return ActivationDtype(str(dtype).removeprefix("torch."))


def plan_in(config: ModelConfig, dtype: torch.dtype, shard: Shard = WHOLE) -> ModelPlan:
    """With matrices of the type of activations."""
    return ModelPlan.of(config, shard, FORMS[activations(dtype)])
