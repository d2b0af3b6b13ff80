"""How many requests fit on devices: the arithmetic of `pdserve kv`."""

from __future__ import annotations

import msgspec

from pdserve.engine.models.config import ModelConfig
from pdserve.engine.plan.forms import FORMS, ActivationDtype
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.plan.sizes import weight_bytes
from pdserve.engine.ranks.shard import Shard, check_ranks
from pdserve.engine.ranks.sizes import Parallelism
from pdserve.engine.steps.worst import LargestStep
from pdserve.kv import KvDtype, KvLayout
from pdserve.kv.companions import windows_worth_it
from pdserve.kv.savings import savings
from pdserve.node.memory.device_budget import gpu_kv_bytes, step_bytes
from pdserve.shared.errors import ConfigError


class Devices(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is to run on."""

    memory_bytes: int  # of each
    number: int = 1
    stages: int = 1  # which share out the layers; those of a stage are tensor-parallel
    utilization: float = 0.9  # share of the memory that may be taken


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What fits, in bytes of each device and requests of all of them together.

    Parts of a model need not be of one size: the largest ones count, as when a node starts.
    """

    weight_bytes: int
    step_bytes: int  # activations and logits of the largest step, graphs, libraries
    kv_bytes: int  # what is left
    token_bytes: int
    state_bytes: int  # of a request, besides: in layers without KV
    num_tokens: int
    num_paged: int  # requests of the given context, each in blocks as it needs them
    num_preallocated: int  # if each had room for the longest context from its start on
    held_on_cpus: float  # share of such a request's KV that a node on CPUs holds on to: windows
    # have passed the rest
    draft_kv_bytes: int = 0  # of kv_bytes, that drafts have on CPUs
    draft_tokens: int = 0  # for which these have room
    kv_format: str  # advice on it, for as many requests as the largest step takes


def capacity(
    model: ModelConfig,
    dtype: ActivationDtype,
    devices: Devices,
    worst: LargestStep,
    *,
    block_size: int,
    context: int,
    longest: int,
    kv_dtype: KvDtype | None = None,
) -> Capacity:
    """Return what fits.

    Args:
        model: the whole of it.
        dtype: of weights and activations.
        devices: without anybody else on them.
        worst: the largest step.
        block_size: tokens.
        context: tokens of a request, prompt and output.
        longest: tokens that a request may have.
        kv_dtype: how KV is stored; None: as dtype.

    Raises:
        ConfigError: the model cannot be divided so, or nothing is left for KV.
    """
    num_ranks, rest = divmod(devices.number, devices.stages)
    if rest:
        raise ConfigError(
            f"{devices.number} devices cannot be divided among {devices.stages} stages: give each "
            "as many as the others"
        )
    check_ranks(model, Parallelism(num_ranks, devices.stages))
    form = FORMS[dtype]
    shards = [Shard(0, num_ranks, stage, devices.stages) for stage in range(devices.stages)]
    weights = max(weight_bytes(ModelPlan.of(model, shard, form), dtype) for shard in shards)
    step = step_bytes(model, dtype, worst, shards[0])
    memory = devices.memory_bytes
    kv_bytes = gpu_kv_bytes(memory, memory, devices.utilization, weights, step)
    layout = model.kv_layout(block_size, kv_dtype or KvDtype(dtype))
    parts = layout.parts(num_ranks, devices.stages)
    largest = max(parts, key=lambda part: part.block_bytes)
    num_blocks = kv_bytes // largest.block_bytes
    num_paged = num_blocks // (largest.blocks_for(context) + largest.state_blocks)
    return Capacity(
        weight_bytes=weights,
        step_bytes=step,
        kv_bytes=kv_bytes,
        token_bytes=largest.token_bytes,
        num_tokens=largest.tokens_in(num_blocks),
        num_paged=num_paged,
        num_preallocated=num_blocks // (largest.blocks_for(longest) + largest.state_blocks),
        state_bytes=largest.state_bytes,
        held_on_cpus=_held(model, layout, context, longest),
        kv_format=savings(largest, weights, min(worst.num_requests, num_paged), context),
    )


def _held(model: ModelConfig, layout: KvLayout, context: int, longest: int) -> float:
    windows = windows_worth_it(model.sliding_windows, longest)
    giving = msgspec.structs.replace(layout, windows=windows)
    held_bytes = giving.blocks_held(context) * giving.block_bytes
    whole = layout.blocks_for(context) + layout.state_blocks
    return held_bytes / (whole * layout.block_bytes)
