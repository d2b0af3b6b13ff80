"""Loads a checkpoint into a decoder: native on a CPU, torch weights elsewhere.

The native decoder maps packed weights (`native/load.py`). For torch, files are memory-mapped, and
tensors are converted and copied into place: by several threads to a GPU
(`cuda/copies/weight_upload.py`), else one at a time, so that peak memory is the model plus one
tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

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
from pdserve.engine.steps.worst import ANY_STEP, WorstStep
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
    worst_step: WorstStep = ANY_STEP,
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
        has_graphs: whether steps are replayed as CUDA graphs. On a GPU only.
        worst_step: the largest step; there are graphs for as much.

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
        return cuda_decoder(
            config, weights, attention, has_graphs=has_graphs, worst_step=worst_step
        )
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
    # Without the biases that rank 0 adds, of which others have no slot.
    names = [name for name in tensors if name in slots]
    copies = [(tensors[name][slots[name].part], slots[name].destination) for name in names]
    total_bytes = sum(destination.nbytes for _, destination in copies)
    loaded_bytes = 0

    def on_loaded(num_bytes: int) -> None:
        nonlocal loaded_bytes
        loaded_bytes += num_bytes
        if on_progress is not None:
            on_progress(loaded_bytes / total_bytes)

    if device.type == "cuda":
        from pdserve.engine.cuda.copies.staging import CudaCopies
        from pdserve.engine.cuda.copies.weight_upload import WeightCopy, upload_weights

        uploads = [WeightCopy(*copy) for copy in copies]
        with torch.cuda.device(device):  # pinned memory is of the thread's current GPU's context
            upload_weights(uploads, CudaCopies(device), on_loaded)
    else:
        for source, destination in copies:
            destination.copy_(source)
            on_loaded(destination.nbytes)
    check_finite({name: slots[name].destination for name in names})
    return weights
