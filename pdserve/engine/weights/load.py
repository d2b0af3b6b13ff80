"""Loads a checkpoint into a decoder: native on a CPU, torch weights elsewhere.

The native decoder maps packed weights (`native/load.py`). For torch, files are memory-mapped, and
tensors are converted and copied into place one at a time: peak memory is the model plus one tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.models.parameters import (
    DecoderWeights,
    allocate_weights,
    tensor_shapes,
    tensor_slots,
)
from pdserve.engine.native.decoder import NativeDecoder
from pdserve.engine.native.linear import WeightKind
from pdserve.engine.native.load import load_native_weights
from pdserve.engine.native.packed_cache import PackedCache
from pdserve.engine.ranks.shard import WHOLE, Shard
from pdserve.engine.ranks.step_memory import StepMemory
from pdserve.engine.weights.finite import check_finite
from pdserve.engine.weights.tensors import open_tensors
from pdserve.model_files.checkpoint import Checkpoint

Progress = Callable[[float], None]  # called with the loaded share, from 0 to 1

_KINDS = {torch.float32: WeightKind.FLOAT32, torch.bfloat16: WeightKind.BFLOAT16}


def load_decoder(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Progress | None = None,
    *,
    is_int8: bool = False,
    cache: PackedCache | None = None,
    kernels: str = "",
    attention: str = "",
    has_graphs: bool = True,
    most_rows: int = 256,
) -> Decoder:
    """Load a model onto a device: native on a CPU, Triton on a GPU.

    Args:
        checkpoint: the checkpoint to load.
        config: of the same checkpoint.
        dtype: dtype to convert to; float16 on a GPU only.
        device: device to load to.
        on_progress: called now and then, from this thread; may raise to abort loading.
        is_int8: quantise the matrices to 8 bits; on a CPU only.
        cache: where packed weights are kept between starts; None keeps none.
        kernels: a build of `_native.kernel_variants()`; "" is the first. On a CPU only.
        attention: name of an attention backend; "" is the fastest that works. On a GPU only.
        has_graphs: whether decode steps become CUDA graphs. On a GPU only.
        most_rows: the most requests of a step, for as many of which there are graphs.

    Raises:
        MissingTensor: the checkpoint lacks a tensor.
        MisshapedTensor: a tensor's shape contradicts config.json.
        ModelError: a file is damaged, holds tensors that this architecture does not have, or values
            that are not finite.
    """
    if device.type != "cpu":
        assert not is_int8, "the node has refused this"
        from pdserve.engine.cuda.load import cuda_decoder  # only where a GPU is asked for

        weights = load_torch_weights(checkpoint, config, dtype, device, on_progress)
        return cuda_decoder(config, weights, attention, has_graphs=has_graphs, most_rows=most_rows)
    kind = WeightKind.INT8 if is_int8 else _KINDS[dtype]
    tell = on_progress or (lambda _: None)
    packed = load_native_weights(checkpoint, config, dtype, kind, cache, tell)
    return NativeDecoder(config, packed, kernels)


def load_rank(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    steps: StepMemory,
    shard: Shard,
    on_progress: Progress,
    *,
    is_int8: bool = False,
    cache: PackedCache | None = None,
    kernels: str = "",
    first_pool_layer: int = 0,
) -> NativeDecoder:
    """Load a rank's share of a model, on a CPU.

    Arguments and errors as for load_decoder, and `steps`: where it meets the other ranks; and
    `first_pool_layer`: its pool has the layers from this one on.
    """
    kind = WeightKind.INT8 if is_int8 else _KINDS[dtype]
    packed = load_native_weights(checkpoint, config, dtype, kind, cache, on_progress, shard)
    return NativeDecoder(config, packed, kernels, shard, steps, first_pool_layer)


def load_torch_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Progress | None = None,
    shard: Shard = WHOLE,
) -> DecoderWeights:
    """Load a rank's weights onto a device. Arguments and errors as for load_decoder.

    Of the files, only the parts that this rank has are read.
    """
    weights = allocate_weights(config, dtype, device, shard)
    slots = tensor_slots(weights, config, shard)
    tensors = open_tensors(
        checkpoint.weight_files(), tensor_shapes(config), ties_embeddings=config.ties_embeddings
    )
    total_bytes = sum(slot.destination.nbytes for slot in slots.values())
    loaded_bytes = 0
    loaded: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        slot = slots.get(name)
        if slot is None:
            continue  # a bias that rank 0 adds
        slot.destination.copy_(tensor[slot.part])
        loaded[name] = slot.destination
        loaded_bytes += slot.destination.nbytes
        if on_progress is not None:
            on_progress(loaded_bytes / total_bytes)
    check_finite(loaded)
    return weights
