"""What a node's memory is divided into, as known from settings and config.json. No torch here.

So `pdserve up` refuses what no node could load, before it starts one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pdserve.engine.models.config import ModelConfig
from pdserve.engine.plan.forms import FLOAT32, ActivationDtype, WeightForm, form_of
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.plan.sizes import packed_bytes
from pdserve.kv import KvDtype, KvLayout
from pdserve.model_files.coding import Coding
from pdserve.node.memory.meminfo import available_bytes, total_bytes
from pdserve.settings.config import EngineConfig
from pdserve.settings.places import PlaceConfig
from pdserve.settings.values import parse_bytes
from pdserve.shared.errors import ConfigError

DeviceType = Literal["cpu", "cuda"]

AUTO_KV_BYTES: Final = 4 << 30
LEAST_BLOCK_TOKENS: Final = 16  # of an automatic block size
MOST_BLOCK_TOKENS: Final = 64  # likewise
LEAST_BLOCKS: Final = 64  # of the longest context
RUN_BYTES: Final = 8 << 10


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a node is to serve, and how much of it at a time."""

    form: WeightForm  # of matrices
    activations: ActivationDtype
    layout: KvLayout
    max_model_len: int  # prompt and output tokens


def sizes_of(engine: EngineConfig, model: ModelConfig, device: DeviceType) -> Sizes:
    """Resolve what is "auto" in the settings of the model's arithmetic.

    Raises:
        ConfigError: the model, or this kind of device, does not do what is asked for.
    """
    if engine.max_model_len > model.max_model_len:
        raise ConfigError(
            f"max_model_len {engine.max_model_len} is more than the model's own "
            f"{model.max_model_len}"
        )
    max_model_len = engine.max_model_len or model.max_model_len
    activations = _activations(engine, model, device)
    form = form_of(engine.quantization, activations)
    if form.is_quantised and device != "cpu":
        _check_quantised(form, activations, model, device)
    dtype = _kv_dtype(engine, model, activations, device)
    row_bytes = max(plane.row_bytes for plane in model.kv_layout(1, dtype).planes)
    block_size = engine.block_size or auto_block_size(row_bytes, device, max_model_len)
    rounded_to = _rounded_to(engine, model, device)
    layout = model.kv_layout(block_size, dtype, rounded_to)
    return Sizes(form, activations, layout, max_model_len)


def _check_quantised(
    form: WeightForm, activations: ActivationDtype, model: ModelConfig, device: DeviceType
) -> None:
    """Raises ConfigError: kernels for GPUs do not multiply this model's matrices."""
    why = ""
    if activations is ActivationDtype.FLOAT32:
        why = "with dtype float32"
    elif model.latent is not None:
        why = "of a model with latent attention"
    if why:
        raise ConfigError(
            f"quantization {form.name} {why} is for CPUs, and this node computes on {device}: "
            "leave it out, or ask for device cpu"
        )


def _activations(engine: EngineConfig, model: ModelConfig, device: DeviceType) -> ActivationDtype:
    """Raises ConfigError: this device does not compute in the dtype that is asked for."""
    if engine.dtype == "auto":
        return model.default_dtype(device)
    if engine.dtype == "float16" and device == "cpu":
        raise ConfigError(
            "dtype float16 is for GPUs, and this node computes on a CPU: ask for bfloat16, or for "
            "float32"
        )
    return ActivationDtype(engine.dtype)


def _kv_dtype(
    engine: EngineConfig, model: ModelConfig, activations: ActivationDtype, device: DeviceType
) -> KvDtype:
    """Raises ConfigError: this device does not read KV of this model that is stored so."""
    if engine.kv_dtype == "auto":
        return KvDtype(activations)
    unread = {
        "of latent attention": model.latent is not None,
        "of a model with states": model.recurrent is not None,
        f"of heads of {model.head_dim} numbers": model.head_dim % 4 > 0,
    }
    if device != "cpu" and any(unread.values()):
        what = next(what for what, is_so in unread.items() if is_so)
        raise ConfigError(
            f"kv_dtype {engine.kv_dtype} {what} is for CPUs, and this node computes on {device}: "
            "leave it out, or ask for device cpu"
        )
    return KvDtype(engine.kv_dtype)


def _rounded_to(engine: EngineConfig, model: ModelConfig, device: DeviceType) -> KvDtype | None:
    """Raises ConfigError: KV is not rounded by this device, or is stored as codes anyway."""
    if engine.wire_dtype == "auto":
        return None
    why = ""
    if device != "cpu":
        why = f"is for CPUs, and this node computes on {device}"
    elif engine.kv_dtype != "auto":
        why = f"is for KV that is sent in fewer bits than stored, and kv_dtype is {engine.kv_dtype}"
    elif model.recurrent is not None:
        why = "does not round states, and this model has layers with a state"
    if why:
        raise ConfigError(f"wire_dtype {engine.wire_dtype} {why}: leave it out")
    return KvDtype(engine.wire_dtype)


def auto_block_size(row_bytes: int, device: DeviceType, max_model_len: int) -> int:
    """Tokens per KV block; `row_bytes`: of the keys, or values, of one token in one head.

    In a block, the keys of a head lie together, and so do its values. A CPU reads scattered blocks
    faster if these runs are longer; beyond RUN_BYTES it gains little. But prefixes are reused in
    whole blocks, so the longest context is to have LEAST_BLOCKS of them.
    """
    if device != "cpu":
        return LEAST_BLOCK_TOKENS
    num_tokens = min(RUN_BYTES // row_bytes, max_model_len // LEAST_BLOCKS)
    power_of_two = 1 << num_tokens.bit_length() >> 1  # kernels process 64 keys at a time
    return min(max(power_of_two, LEAST_BLOCK_TOKENS), MOST_BLOCK_TOKENS)


def cpu_kv_bytes(kv_memory: str, root: Path = Path("/")) -> int:
    """Bytes of a CPU's KV pool, whose pages cost nothing until they are used.

    Raises:
        ConfigError: no size, or more than all memory of the machine whose files are in `root`.
    """
    if kv_memory == "auto":
        return min(available_bytes(root) // 4, AUTO_KV_BYTES)
    budget_bytes, most_bytes = parse_bytes(kv_memory), total_bytes(root)
    if budget_bytes > most_bytes:
        raise ConfigError(
            f'kv_memory "{kv_memory}" is more than all memory of this machine or container '
            f"({most_bytes >> 20}MiB): lower it"
        )
    return budget_bytes


def place_kv_bytes(engine: EngineConfig, place: PlaceConfig, num_bytes: int) -> int:
    """Bytes of the largest KV pool beside these weights in the memory of a node's places."""
    left = max(0, parse_bytes(place.memory) - num_bytes)
    return left if engine.kv_memory == "auto" else min(left, parse_bytes(engine.kv_memory))


def check_memory(
    engine: EngineConfig,
    model: ModelConfig,
    stored_bytes: int,
    root: Path = Path("/"),
    codings: Mapping[str, Coding] | None = None,
) -> int:
    """Check that the memory holds the weights, and the KV of one request of the longest.

    Returns the bytes of both, if the size of the files is known.

    Args:
        engine: of a node that computes on this machine's CPU.
        model: that it is to serve.
        stored_bytes: size of its weight files; 0: unknown.
        root: where the machine's files are.
        codings: of tensors that are packed as they are stored.

    Raises:
        ConfigError, KvBudgetTooSmall: it does not; with the numbers.
    """
    sizes = sizes_of(engine, model, "cpu")
    kv_bytes = cpu_kv_bytes(engine.kv_memory, root)
    sizes.layout.blocks_in_budget(kv_bytes, sizes.max_model_len)
    stored_bits = 32 if model.stored_dtype == FLOAT32.name else 16
    # Embeddings are not quantised, and count less.
    as_loaded, packed_as = stored_bytes * sizes.form.bits // stored_bits, f"in {sizes.form.name}"
    if codings and not sizes.form.is_quantised:
        plan = ModelPlan.of(model, form=sizes.form, codings=codings)
        as_loaded, packed_as = packed_bytes(plan, sizes.activations), "as stored"
    if engine.kv_memory == "auto":
        kv_bytes = 0  # it takes what there is
    as_loaded //= 1 + len(engine.rank_hosts)  # which share them out
    most_bytes = total_bytes(root)
    if as_loaded + kv_bytes > most_bytes:
        kv = f" and kv_memory {_gib(kv_bytes)}" if kv_bytes else ""
        raise ConfigError(
            f"weights take {_gib(as_loaded)} {packed_as}{kv}, and this machine or "
            f"container has {_gib(most_bytes)}: take a smaller model, --quantization int8, or less "
            "--kv-memory"
        )
    return as_loaded + sizes.layout.least_blocks(sizes.max_model_len) * sizes.layout.block_bytes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
