"""Which tensors of a checkpoint are coded, and how, as known before they are read.

For GGUF files without torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.quantised.config import quantisation_of
from pdserve.engine.plan.forms import WeightForm
from pdserve.engine.plan.further import FurtherLayer
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.ranks.shard import WHOLE, Shard
from pdserve.engine.weights.gguf_parts import find_parts
from pdserve.model_files.checkpoint import Checkpoint
from pdserve.model_files.coding import Coding, on_device
from pdserve.model_files.stored_types import type_names
from pdserve.shared.errors import ConfigError

_OF_EXPERT: Final = re.compile(r"(.+\.experts)\.\d+\.(gate|up|down)_proj\.(weight|bias)")
_PLAIN: Final = frozenset({"F64", "F32", "F16", "BF16"})  # weights, and no codes of such


def stored_codings(checkpoint: Checkpoint, config: ModelConfig) -> Mapping[str, Coding]:
    """Return name of a tensor of the model |-> its coding, for those that have one."""
    if checkpoint.gguf is None:
        is_plain = quantisation_of(checkpoint) is None
        return {} if is_plain else _opened_codings(checkpoint, ModelPlan.of(config))
    places = _places(config)
    parts = find_parts(checkpoint.gguf, dict.fromkeys(places.values()))
    codings = {name: part.coding for name, part in parts.items() if part.coding is not None}
    return {name: codings[place] for name, place in places.items() if place in codings}


def _opened_codings(checkpoint: Checkpoint, plan: ModelPlan) -> Mapping[str, Coding]:
    from pdserve.engine.weights.opening import open_tensors  # has torch
    from pdserve.engine.weights.stored.tensors import CodedTensor

    expected, ignored = plan.expected(), plan.ignored()
    tensors = open_tensors(checkpoint, expected, ignored=ignored, within=plan.within())
    coded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, CodedTensor)}
    return {name: tensor.coding for name, tensor in coded.items() if tensor.coding is not None}


def further_layers(
    checkpoint: Checkpoint, config: ModelConfig, form: WeightForm
) -> tuple[FurtherLayer, ...]:
    """Plan the layers behind the model's own, as many as files have, likewise."""
    stored = type_names(checkpoint)
    codes = not form.is_quantised and quantisation_of(checkpoint) is not None
    layers: list[FurtherLayer] = []
    for index in range(config.num_further_layers):
        plan = FurtherLayer.behind(config, index, stored, form, {})
        if any(name not in stored for name in plan.entrance()):
            break
        if codes:
            codings = _opened_codings(checkpoint, plan)
            plan = FurtherLayer.behind(config, index, stored, form, codings)
        layers.append(plan)
    return tuple(layers)


def stored_as(checkpoint: Checkpoint, config: ModelConfig) -> Mapping[str, str]:
    """Return name of a tensor of the model |-> its type, as far as files have it."""
    types = type_names(checkpoint)
    places = {name: _stack_of(place, types) for name, place in _places(config).items()}
    if checkpoint.gguf is not None:
        parts = find_parts(checkpoint.gguf, dict.fromkeys(places.values()))
        types = {name: part.tensor.type.name for name, part in parts.items()}
    elif (quantisation := quantisation_of(checkpoint)) is not None:
        modules = {name.rpartition(".")[0] for name in types}
        own = {f"{module}.weight": module for module in modules}
        codes = {name: module for name, module in own.items() if types.get(name) not in _PLAIN}
        codes |= {name: name for name in types if name.endswith("_proj_blocks")}
        wanted = codes.keys() & places.values()
        types = {**types, **{name: quantisation.kind_of(codes[name]) for name in wanted}}
    return {name: types[place] for name, place in places.items() if place in types}


def _stack_of(name: str, types: Mapping[str, str]) -> str:
    """What files have a tensor in, if it is in a stack of experts (`stored/stacks.py`)."""
    if name in types or (match := _OF_EXPERT.fullmatch(name)) is None:
        return name
    stack = f"{match[1]}.{'down_proj' if match[2] == 'down' else 'gate_up_proj'}"
    if match[3] == "bias":
        return f"{stack}_bias"
    return stack if stack in types else f"{stack}_blocks"


def _places(config: ModelConfig) -> dict[str, str]:
    """Tensor of the model |-> that of files which has it."""
    plan = ModelPlan.of(config)
    within = plan.within()
    return {name: within[name].name if name in within else name for name in plan.expected()}


def native_plan(
    checkpoint: Checkpoint, config: ModelConfig, form: WeightForm, shard: Shard = WHOLE
) -> ModelPlan:
    """Plan what a rank has of a checkpoint on a CPU: as stored where that loses nothing.

    Matrices of a form that weights are quantised to on purpose are all in that.
    """
    codings = {} if form.is_quantised else stored_codings(checkpoint, config)
    return ModelPlan.of(config, shard, form, codings)


def device_plan(
    checkpoint: Checkpoint, config: ModelConfig, form: WeightForm, shard: Shard = WHOLE
) -> ModelPlan:
    """Plan what a rank has of a checkpoint on a GPU: as native_plan, in codes of 4 or 8 bits.

    The embedding is decoded, as everything is in float32, in models with latent attention, and
    where Triton is missing.

    Raises:
        ConfigError: weights are to be quantised, and one of these keeps us from it.
    """
    from pdserve.engine.cuda.attention.catalog import triton_missing  # has torch

    lacking = triton_missing()
    if lacking is not None and form.is_quantised:
        raise ConfigError(f"quantization {form.name} on a GPU takes our kernels: {lacking}")
    codings: Mapping[str, Coding] = {}
    if form.bits == 16 and config.latent is None and lacking is None:
        stored = stored_codings(checkpoint, config)
        codings = {name: on_device(coding) for name, coding in stored.items()}
    return replace(ModelPlan.of(config, shard, form, codings), table=None)
