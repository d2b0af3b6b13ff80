"""Loads a checkpoint into a decoder: native on a CPU, torch weights elsewhere.

The native decoder maps packed weights (`native/load.py`). For torch, files are memory-mapped, and
tensors are converted and copied into place: by several threads to a GPU
(`cuda/copies/weight_upload.py`), else one at a time, so that peak memory is the model plus one
tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from pdserve.engine.layers import Linear, empty_linear, torch_dtype
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.models.parameters import (
    DecoderWeights,
    EmptyLinear,
    TensorSlot,
    allocate_weights,
)
from pdserve.engine.native.decoder import NativeDecoder
from pdserve.engine.native.load import load_native_weights, pieces
from pdserve.engine.native.packed_cache import PackedCache
from pdserve.engine.plan.forms import ActivationDtype
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.ranks.step_memory import StepMemory
from pdserve.engine.steps.worst import ANY_STEP, LargestStep
from pdserve.engine.weights.finite import check_codes, check_finite, check_scales
from pdserve.engine.weights.opening import open_tensors
from pdserve.engine.weights.stored.tensors import CodedTensor, StoredTensor
from pdserve.model_files.checkpoint import Checkpoint

Progress = Callable[[float], None]  # called with the loaded share, from 0 to 1

_DECODED_BYTES: Final = 256 << 20  # of tensors that are not mapped: so many wait for a copy


def load_decoder(
    checkpoint: Checkpoint,
    plan: ModelPlan,
    dtype: ActivationDtype,
    device: torch.device,
    on_progress: Progress | None = None,
    *,
    cache: PackedCache | None = None,
    kernels: str = "",
    attention: str = "",
    has_graphs: bool = True,
    worst_step: LargestStep = ANY_STEP,
    tap_layers: tuple[int, ...] = (),
    kv_codes: bool = False,
) -> Decoder:
    """Load a model onto a device: native on a CPU, Triton on a GPU.

    Args:
        checkpoint: the checkpoint to load.
        plan: of the same checkpoint, in a form that nodes with this device serve.
        dtype: of activations; float16 on a GPU only.
        device: device to load to.
        on_progress: called now and then, from this thread; may raise to abort loading.
        cache: where packed weights are kept between starts; None keeps none.
        kernels: a build of `_native.kernel_variants()`; "" is the first. On a CPU only.
        attention: name of an attention backend; "" is the fastest that works. On a GPU only.
        has_graphs: whether steps are replayed as CUDA graphs. On a GPU only.
        worst_step: the largest step; there are graphs for as much.
        tap_layers: of the taps that steps may have. On a GPU only: elsewhere they may have any.
        kv_codes: whether the pool will have codes. On a GPU only.

    Raises:
        MissingTensor: the checkpoint lacks a tensor.
        MisshapedTensor: a tensor's shape contradicts config.json.
        ModelError: a file is damaged, holds tensors that this architecture does not have, or values
            that are not finite.
    """
    assert device.type in plan.form.devices, "the node has refused this"
    if device.type != "cpu":
        from pdserve.engine.cuda.load import cuda_decoder  # only where a GPU is asked for

        weights = load_device_weights(checkpoint, plan, dtype, device, on_progress)
        return cuda_decoder(
            plan.config,
            weights,
            attention,
            has_graphs=has_graphs,
            worst_step=worst_step,
            tap_layers=tap_layers,
            kv_codes=kv_codes,
        )
    tell = on_progress or (lambda _: None)
    packed = load_native_weights(checkpoint, plan, torch_dtype(dtype), cache, tell)
    return NativeDecoder(plan.config, packed, kernels)


def load_rank(
    checkpoint: Checkpoint,
    plan: ModelPlan,
    dtype: ActivationDtype,
    steps: StepMemory,
    on_progress: Progress,
    *,
    cache: PackedCache | None = None,
    kernels: str = "",
    first_pool_layer: int = 0,
) -> NativeDecoder:
    """Load a rank's share of a model, on a CPU.

    Arguments and errors as for load_decoder, and `steps`: where it meets the other ranks; and
    `first_pool_layer`: its pool has the layers from this one on.
    """
    packed = load_native_weights(checkpoint, plan, torch_dtype(dtype), cache, on_progress)
    return NativeDecoder(plan.config, packed, kernels, plan.shard, steps, first_pool_layer)


def load_device_weights(
    checkpoint: Checkpoint,
    plan: ModelPlan,
    dtype: ActivationDtype,
    device: torch.device,
    on_progress: Progress | None = None,
) -> DecoderWeights:
    """As load_torch_weights, for our kernels on a GPU, which read codes as they are."""
    if all(not matrix.form.is_coded for matrix in plan.matrices):
        return load_torch_weights(checkpoint, plan, dtype, device, on_progress)
    from pdserve.engine.cuda.quantised.linear import device_linear  # has Triton

    return load_torch_weights(checkpoint, plan, dtype, device, on_progress, device_linear)


def load_torch_weights(
    checkpoint: Checkpoint,
    plan: ModelPlan,
    dtype: ActivationDtype,
    device: torch.device,
    on_progress: Progress | None = None,
    empty: EmptyLinear = empty_linear,
) -> DecoderWeights:
    """Load a rank's weights onto a device. Arguments and errors as for load_decoder.

    Of the files, only the parts that this rank has are read. `empty` allocates matrices.
    """
    tensors = open_tensors(
        checkpoint,
        plan.expected(),
        ignored=plan.ignored(),
        within=plan.within(),
    )
    check_scales(tensors)
    weights = allocate_weights(plan, torch_dtype(dtype), device, empty)
    # Without the biases that rank 0 adds, of which others have no slot.
    own = {name: weights.slots[name] for name in tensors if name in weights.slots}
    slots = [(name, slot) for name, tied in own.items() for slot in tied.places]
    total_bytes = sum(slot.destination.nbytes for _, slot in slots)
    loaded_bytes = 0

    def on_loaded(num_bytes: int) -> None:
        nonlocal loaded_bytes
        loaded_bytes += num_bytes
        if on_progress is not None:
            on_progress(loaded_bytes / total_bytes)

    copies, num_decoded = [], 0
    for name, slot in slots:
        stored = tensors[name]
        if slot.quantised is not None:
            _put(name, stored, slot, slot.quantised)
            on_loaded(slot.destination.nbytes)
            continue
        source = stored[slot.part]
        if slot.offset:
            source = source.float() + slot.offset
        copies.append((source, slot.destination))
        num_decoded += 0 if isinstance(stored, Tensor) else source.nbytes
        if num_decoded > _DECODED_BYTES:
            _copy(copies, device, on_loaded)
            copies, num_decoded = [], 0
    _copy(copies, device, on_loaded)
    check_finite({name: slot.checked for name, slot in slots})
    return weights


def _put(name: str, stored: StoredTensor, slot: TensorSlot, linear: Linear) -> None:
    """Make codes of a tensor, or take its own, some rows at a time."""
    rows, *columns = slot.part
    for piece in pieces(range(rows.start, rows.stop), stored):
        here = slot.first_row + piece.start - rows.start
        if linear.keeps_codes:
            assert isinstance(stored, CodedTensor), "as planned"
            codes = stored.coded((piece, *columns))
            check_codes(name, codes, piece.start)
            linear.put(here, codes)
        else:
            linear.put(here, stored[(piece, *columns)].to(linear.weight.device))


def _copy(
    copies: list[tuple[Tensor, Tensor]], device: torch.device, on_loaded: Callable[[int], None]
) -> None:
    """Copy each source to its destination on the device."""
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
