"""Safetensors files into a decoder's weights, tensor by tensor.

Files are memory-mapped, and each tensor is converted and copied into its place on its own: the
peak is the model and one tensor. Every tensor is accounted for: one that is missing, misshapen or
not understood is an error, since the model would answer, and wrongly.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdserve.checkpoint import Checkpoint
from pdserve.engine.attention import attention_backend
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.models.parameters import (
    DecoderWeights,
    TensorSlot,
    allocate_weights,
    tensor_slots,
)
from pdserve.engine.models.torch_decoder import TorchDecoder
from pdserve.engine.native.decoder import NativeDecoder
from pdserve.engine.native.linear import WeightKind
from pdserve.engine.native.pack import pack_weights
from pdserve.errors import MisshapedTensor, MissingTensor, ModelError

# Tables that older exporters saved though they follow from config.json.
_DERIVED = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_CONVERTIBLE = {torch.float32, torch.float64, torch.float16, torch.bfloat16}

Progress = Callable[[float], None]  # called with the share that is loaded, from 0 to 1


def load_decoder(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Progress | None = None,
) -> Decoder:
    """Load a model onto a device: native on a CPU, Triton on a GPU.

    Args:
        checkpoint: whose weights.
        config: of the same checkpoint.
        dtype: to convert to; float32 or bfloat16.
        device: to load to.
        on_progress: called after each tensor, from this thread.

    Raises:
        MissingTensor: the checkpoint lacks a tensor.
        MisshapedTensor: a tensor's shape contradicts config.json.
        ModelError: a file is damaged, or holds tensors that this architecture does not have.
    """
    if device.type != "cpu":
        from pdserve.engine.cuda.load import cuda_decoder  # only where a GPU is asked for

        return cuda_decoder(config, _load_weights(checkpoint, config, dtype, device, on_progress))
    weights = _load_weights(checkpoint, config, dtype, device, on_progress)
    kind = WeightKind.FLOAT32 if dtype == torch.float32 else WeightKind.BFLOAT16
    return NativeDecoder(config, pack_weights(weights, config, kind))


def load_torch_decoder(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Progress | None = None,
) -> TorchDecoder:
    """Load a model for plain torch; see load_decoder."""
    weights = _load_weights(checkpoint, config, dtype, device, on_progress)
    return TorchDecoder(config, weights, attention_backend(device))


def _load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Progress | None,
) -> DecoderWeights:
    weights = allocate_weights(config, dtype, device)
    slots = tensor_slots(weights, config)
    _Loader(slots, config.ties_embeddings, on_progress).load(checkpoint.weight_files())
    return weights


class _Loader:
    """Fills slots from files, and knows what is still missing."""

    def __init__(
        self, slots: dict[str, TensorSlot], ties_embeddings: bool, on_progress: Progress | None
    ) -> None:
        self._slots = slots
        self._missing = set(slots)
        self._unexpected: list[str] = []
        self._ties_embeddings = ties_embeddings
        self._on_progress = on_progress
        self._loaded_bytes = 0
        self._total_bytes = sum(slot.destination.nbytes for slot in slots.values())

    def load(self, files: list[Path]) -> None:
        for file in files:
            try:
                with safe_open(file, framework="pt", device="cpu") as tensors:
                    self._load_file(file, tensors)
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} is damaged or cannot be read: {error}") from error
        if self._missing:
            raise MissingTensor(f"{files[0].parent} lacks {_listed(self._missing)}")
        if self._unexpected:
            raise ModelError(
                f"{files[0].parent} holds {_listed(self._unexpected)}, which config.json does not "
                "account for"
            )

    def _load_file(self, file: Path, tensors: Any) -> None:
        for name in tensors.offset_keys():  # in the order of the file
            if name in self._slots:
                self._fill(file, name, tensors.get_tensor(name))
            elif not self._is_harmless(name):
                self._unexpected.append(name)

    def _fill(self, file: Path, name: str, tensor: Tensor) -> None:
        slot = self._slots[name]
        if tuple(tensor.shape) != slot.shape:
            raise MisshapedTensor(
                f"{file}: {name} has the shape {list(tensor.shape)}, but config.json makes it "
                f"{list(slot.shape)}"
            )
        if tensor.dtype not in _CONVERTIBLE:
            raise ModelError(
                f"{file}: {name} is of type {tensor.dtype}; quantised weights are not supported"
            )
        slot.destination.copy_(tensor)
        self._missing.discard(name)
        self._loaded_bytes += slot.destination.nbytes
        if self._on_progress is not None:
            self._on_progress(self._loaded_bytes / self._total_bytes)

    def _is_harmless(self, name: str) -> bool:
        is_tied_copy = self._ties_embeddings and name == "lm_head.weight"
        return is_tied_copy or _DERIVED.search(name) is not None


def _listed(names: set[str] | list[str]) -> str:
    """The first names, and how many more there are."""
    shown = sorted(names)[:3]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
