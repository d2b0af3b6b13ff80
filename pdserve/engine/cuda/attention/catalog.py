"""The attention backends for GPUs, by name, and which of them can be used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import torch
from torch import Tensor

from pdserve.engine.attention.interface import AttentionBackend, AttentionBatch, LayerKv
from pdserve.engine.attention.reference import ReferenceAttention
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.ranks.shard import Shard
from pdserve.shared.errors import ConfigError
from pdserve.shared.hints.extras import how_to_install

if TYPE_CHECKING:  # they need Triton
    from pdserve.engine.cuda.attention.flash_attention import FlashAttention
    from pdserve.engine.cuda.attention.triton_attention import TritonAttention

_INSTALL: Final = how_to_install("cuda")
_HEAD_DIMS: Final = frozenset({64, 128, 256})  # supported by FlashInfer and FlashAttention 3


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a model requires of a backend."""

    dtype: torch.dtype
    head_dim: int
    num_heads: int = 4
    num_kv_heads: int = 2
    windows: tuple[int | None, ...] = (None,)  # of each layer: ModelConfig.sliding_windows
    cap: float | None = None  # of scores; None: there is none
    has_sinks: bool = False
    value_dim: int | None = None  # as LayerKv has it
    kv_codes: bool = False  # the pool has them

    @classmethod
    def of(
        cls, config: ModelConfig, shard: Shard, dtype: torch.dtype, *, kv_codes: bool = False
    ) -> AttentionNeeds:
        """What one rank of a model with activations of `dtype` requires."""
        own, layers = shard.of(config), shard.layers(config)
        return cls(
            dtype,
            own.head_dim,
            own.num_heads,
            own.num_kv_heads,
            own.sliding_windows[layers.start : layers.stop],
            own.arithmetic.attention_cap,
            own.has_sinks,
            None if own.latent is None else own.latent.rank,
            kv_codes,
        )


class DecodeAttention(Protocol):
    """Attention for decode steps that a CUDA graph can capture: it does nothing on the host."""

    @property
    def name(self) -> str:
        """That of its backend."""

    def attend_decode(self, query: Tensor, kv: LayerKv, batch: AttentionBatch) -> Tensor:
        """Compute causal attention of every query row over its request's blocks.

        Every request has one row, and perhaps no context yet.
        """


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """One backend."""

    name: str
    # Returns why this process cannot use it; None if it can.
    missing: Callable[[], str | None]
    # Returns why it does not support a model; None if it does.
    unfit: Callable[[AttentionNeeds], str | None]
    open: Callable[[torch.device], AttentionBackend]
    # The same for graphs; None: it cannot be captured.
    open_captured: Callable[[torch.device], DecodeAttention] | None = None

    def obstacle(self, needs: AttentionNeeds | None) -> str | None:
        """Return why the backend cannot be used; None if it can."""
        lacking = self.missing()
        if lacking is not None or needs is None:
            return lacking
        return self.unfit(needs)


def _module_missing(module: str, remedy: str, capability: tuple[int, int]) -> str | None:
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    if torch.cuda.get_device_capability() < capability:
        return f"needs compute capability {capability[0]}.{capability[1]}"
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a CUDA library is missing
        return f"{error}: {remedy}"
    return None


def _half_precision_only(needs: AttentionNeeds) -> str | None:
    if needs.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bfloat16 or float16, the model is {needs.dtype}"
    if needs.kv_codes:
        return "reads no KV in codes with scales of rows, as kv_dtype has it"
    if needs.value_dim is not None:
        return "is not asked for latent attention, which the model has"
    if needs.has_sinks:
        return "is not asked for sinks, which the model has"
    if needs.head_dim not in _HEAD_DIMS:
        return f"has heads of {sorted(_HEAD_DIMS)}, the model's are of {needs.head_dim}"
    if needs.cap is not None:
        return "is not asked for soft caps of scores, which the model has"
    return None


def _fits_all(_: AttentionNeeds) -> str | None:
    return None


def _flashinfer(device: torch.device) -> AttentionBackend:
    from pdserve.engine.cuda.attention.flash_infer import FlashInferAttention

    return FlashInferAttention(importlib.import_module("flashinfer"), device)


def _flash_attn(_: torch.device) -> FlashAttention:
    from pdserve.engine.cuda.attention.flash_attention import FlashAttention

    return FlashAttention(importlib.import_module("flash_attn_interface"))


def _triton(_: torch.device) -> TritonAttention:
    from pdserve.engine.cuda.attention.triton_attention import TritonAttention

    return TritonAttention()


def triton_missing() -> str | None:
    """Return what this process lacks for our own kernels; None if nothing."""
    return _module_missing("triton", _INSTALL, (8, 0))


def _both(module: str, remedy: str, capability: tuple[int, int]) -> Callable[[], str | None]:
    """Return a check for a library and for Triton: our kernels write KV, libraries only attend."""
    return lambda: _module_missing(module, remedy, capability) or triton_missing()


KINDS: Final = (  # the last one is for want of others
    AttentionKind(
        "flashinfer",
        _both("flashinfer", "pip install flashinfer-python", (8, 0)),
        _half_precision_only,
        _flashinfer,
    ),
    AttentionKind(
        "flash_attn",
        _both("flash_attn_interface", "build FlashAttention 3 from its source", (9, 0)),
        _half_precision_only,
        _flash_attn,
        _flash_attn,
    ),
    AttentionKind("triton", triton_missing, _fits_all, _triton, _triton),
    AttentionKind("reference", lambda: None, _fits_all, lambda _: ReferenceAttention()),
)


def choose_kind(name: str, needs: AttentionNeeds | None) -> AttentionKind:
    """Return the backend with this name; without a name, the first one that can be used.

    Raises:
        ConfigError: the name is unknown, or this backend cannot be used here.
    """
    if not name:
        return next(kind for kind in KINDS if kind.obstacle(needs) is None)
    by_name = {kind.name: kind for kind in KINDS}
    if name not in by_name:
        raise ConfigError(f"no attention is called {name!r}: choose of {', '.join(by_name)}")
    obstacle = by_name[name].obstacle(needs)
    if obstacle is not None:
        raise ConfigError(f"attention {name!r} was asked for: {obstacle}")
    return by_name[name]
