"""Compiles the Triton kernels as they are served, for GPUs that need not be there.

The launchers run on tensors that have shapes and no memory, and Triton compiles what they launch
as on a GPU: with the same constants, options and guesses about arguments. The arguments are the
compute capability and which function launches them, if not all do; prints as JSON an entry for each
kernel that would be compiled. A process of its own: in the tests' process they are interpreted.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from pdserve.engine.attention import AttentionBatch, LayerKv
from pdserve.engine.cuda.attention.triton_attention import TritonAttention
from pdserve.engine.cuda.layers import latent, rows
from pdserve.engine.cuda.layers.adapters import add_low_rank
from pdserve.engine.cuda.layers.experts import mix_experts
from pdserve.engine.cuda.layers.recurrent import RecurrentLayers
from pdserve.engine.cuda.quantised.experts import Places, multiply_stack
from pdserve.engine.cuda.quantised.linear import QuantisedLinear, device_linear
from pdserve.engine.cuda.quantised.products import tiles_of
from pdserve.engine.cuda.sampling import launches
from pdserve.engine.cuda.sampling.inputs import EditInputs, EditKind, MaskInputs, RankInputs
from pdserve.engine.cuda.sampling.results import Results
from pdserve.engine.experts import Experts
from pdserve.engine.layers import Linear, Mlp
from pdserve.engine.models.expert_config import ExpertConfig, ExpertNames
from pdserve.engine.models.latent import LatentShape
from pdserve.engine.models.parameters import LayerWeights
from pdserve.engine.models.recurrent import RecurrentShape
from pdserve.engine.plan.forms import FP8, INT4, INT8, coded_form
from pdserve.engine.plan.matrix import Matrix, Part
from pdserve.engine.steps.batch import StateTables
from pdserve.model_files.coding import Coding, ScaleType

NUM_ROWS = 64  # of a step: as many requests
BLOCK_SIZE = 16  # of the pool, by default on GPUs
TABLE_WIDTH = 2048  # blocks: 32k tokens


@dataclass(frozen=True)
class Model:
    """The sizes of one."""

    name: str
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    inner_width: int
    num_experts: int = 0
    has_qk_norm: bool = False
    vocab_size: int = 128_256
    cap: float | None = None  # of scores; those with one have GELU
    is_gpt_oss: bool = False  # with sinks, a window, clamps, and biases of experts
    latent: LatentShape | None = None


LLAMA_8B = Model("8B", torch.bfloat16, 32, 8, 128, 4096, 14_336)
QWEN3_30B = Model("30B-A3B", torch.bfloat16, 32, 4, 128, 2048, 768, 128, has_qk_norm=True)
GEMMA2_9B = Model("Gemma 2 9B", torch.bfloat16, 16, 8, 256, 3584, 14_336, cap=50.0)
GPT_OSS_120B = Model("gpt-oss 120B", torch.bfloat16, 64, 8, 64, 2880, 2880, 128, is_gpt_oss=True)
DEEPSEEK_V3 = Model(
    "DeepSeek V3",
    torch.bfloat16,
    128,
    1,
    576,
    7168,
    2048,
    latent=LatentShape(512, 64, 128, 128, 1536),
)
# Numbers that are no powers of two, few KV heads, and products in float32.
UNEVEN = Model("uneven", torch.float32, 15, 3, 80, 1200, 700, 100, has_qk_norm=True)
UNEVEN_LATENT = Model(
    "uneven latent", torch.float32, 5, 1, 94, 1200, 700, latent=LatentShape(80, 14, 20, 30, None)
)


def shaped(*sizes: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def ints(*sizes: int) -> Tensor:
    return shaped(*sizes, dtype=torch.int32)


def longs(*sizes: int) -> Tensor:
    return shaped(*sizes, dtype=torch.int64)


def floats(*sizes: int) -> Tensor:
    return shaped(*sizes, dtype=torch.float32)


def launch_layer(model: Model) -> None:
    """All of a layer that is not cuBLAS's, and what begins a graph of it."""
    num_qk, dim = model.num_heads + model.num_kv_heads, model.head_dim
    weights = shaped(model.hidden_size, dtype=model.dtype)
    delta = shaped(NUM_ROWS, model.hidden_size, dtype=model.dtype)
    pool = shaped(4096, 32, 2, model.num_kv_heads, BLOCK_SIZE, dim, dtype=model.dtype)
    rows.spread_tables(ints(1), ints(1), ints(NUM_ROWS), ints(NUM_ROWS, TABLE_WIDTH), BLOCK_SIZE)
    rows.take_sampled(longs(NUM_ROWS), ints(NUM_ROWS))
    rows.add_rms_norm(floats(NUM_ROWS, model.hidden_size), delta, weights, 1e-5)
    norm = shaped(num_qk, dim, dtype=model.dtype) if model.has_qk_norm else None
    angles = floats(NUM_ROWS, 1, dim // 2)
    qkv = shaped(NUM_ROWS, (num_qk + model.num_kv_heads) * dim, dtype=model.dtype)
    rotation = rows.Rotation(angles, angles, norm, 1e-5)
    query = rows.rotate_and_write(qkv, rotation, longs(NUM_ROWS), pool, 1)
    sinks = floats(model.num_heads) if model.is_gpt_oss else None
    window = 128 if model.is_gpt_oss else None
    TritonAttention().attend(
        query, LayerKv(pool, 1, dim**-0.5, window, model.cap, sinks), attention_batch()
    )
    if not model.num_experts:
        gated = rows.silu_mul if model.cap is None else rows.gelu_mul
        gated(shaped(NUM_ROWS, 2 * model.inner_width, dtype=model.dtype))


def attention_batch() -> AttentionBatch:
    tables = ints(NUM_ROWS, TABLE_WIDTH)
    return AttentionBatch(ints(NUM_ROWS + 1), ints(NUM_ROWS), tables, longs(NUM_ROWS))


def launch_coded_kv(model: Model) -> None:
    """What writes and reads pools of codes."""
    num_qk, dim = model.num_heads + model.num_kv_heads, model.head_dim
    qkv = shaped(NUM_ROWS, (num_qk + model.num_kv_heads) * dim, dtype=model.dtype)
    angles = floats(NUM_ROWS, 1, dim // 2)
    for codes in (torch.int8, torch.uint8):
        pool = shaped(4096, 32, 2, model.num_kv_heads, BLOCK_SIZE, dim + 4, dtype=codes)
        rotation = rows.Rotation(angles, angles, None, 1e-5)
        query = rows.rotate_and_write(qkv, rotation, longs(NUM_ROWS), pool, 1)
        TritonAttention().attend(query, LayerKv(pool, 1, dim**-0.5), attention_batch())


def launch_latent(model: Model) -> None:
    """Attention of a layer, and what writes its rows."""
    shape = model.latent
    assert shape is not None
    row_dim, heads, dtype = shape.row_dim, (NUM_ROWS, model.num_heads), model.dtype
    pool = shaped(4096, 32, 1, 1, BLOCK_SIZE, row_dim, dtype=dtype)
    queries, out = (
        shaped(*heads, shape.query_dim, dtype=dtype),
        shaped(*heads, row_dim, dtype=dtype),
    )
    made, norm = shaped(NUM_ROWS, row_dim, dtype=dtype), shaped(shape.rank, dtype=dtype)
    angles = floats(NUM_ROWS, 1, shape.rope_dim // 2)
    latent.rotate_and_write(
        queries, made, norm, shape, (angles, angles), longs(NUM_ROWS), pool, 1, out
    )
    kv = LayerKv(pool, 1, row_dim**-0.5, value_dim=shape.rank)
    TritonAttention().attend(out, kv, attention_batch())


def launch_experts(model: Model) -> None:
    hidden, inner, num_experts = model.hidden_size, model.inner_width, model.num_experts
    names = ExpertNames("mlp", "gate", "up", "down")
    config = ExpertConfig(num_experts, 8, inner, True, frozenset({0}), names)
    gate_up = shaped(num_experts, 2 * inner, hidden, dtype=model.dtype)
    down = shaped(num_experts, hidden, inner, dtype=model.dtype)
    router = Linear(floats(num_experts, hidden), None)
    biases = [
        shaped(num_experts, width, dtype=model.dtype) if model.is_gpt_oss else None
        for width in (2 * inner, hidden)
    ]
    layer = Experts(config, router, Linear(gate_up, biases[0]), Linear(down, biases[1]))
    x = shaped(8 * num_experts, hidden, dtype=model.dtype)  # the largest tiles
    mix_experts(x, layer, rows.clamped_mul if model.is_gpt_oss else rows.silu_mul)


def launch_adapters(model: Model) -> None:
    """What is added to queries, keys and values: four adapters, of which two have many ranks."""
    width = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    x = shaped(NUM_ROWS, model.hidden_size, dtype=model.dtype)
    y, bias = shaped(NUM_ROWS, width, dtype=model.dtype), shaped(width, dtype=model.dtype)
    for ranks, own_bias in ((48, None), (192, bias)):
        add_low_rank(longs(8, 5), ints(NUM_ROWS), ints(NUM_ROWS // 16), ranks, x, y, own_bias)


def launch_quantised(model: Model) -> None:
    """Products of few rows, of more, and of many, with weights of each kind; and experts."""
    device, sizes = torch.device("meta"), (model.hidden_size, model.inner_width)
    part = Part("", range(2 * sizes[1]))
    for form in (INT8, FP8, INT4, *(coded_form(coding) for coding in CODED)):
        matrix = Matrix("", (part,), range(sizes[0]), form, has_bias=form is INT8)
        one, stack = (device_linear(matrix, model.dtype, device, *of) for of in ((), (128,)))
        assert isinstance(one, QuantisedLinear)
        assert isinstance(stack, QuantisedLinear)
        for tile in tiles_of(one.kind):
            one(shaped(tile.rows, sizes[0], dtype=model.dtype))
        if form in (INT8, INT4):
            places = Places(longs(NUM_ROWS), longs(129), longs(8, 8), 8)
            x = shaped(NUM_ROWS, sizes[0], dtype=model.dtype)
            multiply_stack(x, stack.weights, places, 64, NUM_ROWS, torch.float32, is_in_place=True)


def launch_states(model: Model) -> None:
    """A layer with a state, of Qwen3-Next."""
    shape = RecurrentShape(16, 32, 128, 128, 4, frozenset({0}))
    convolution = floats(shape.channels, 1, shape.kernel)
    vectors = {"decay": floats(32), "decay_bias": floats(32), "value_norm": floats(128)}
    norms = {"convolution": convolution, **vectors}
    layer = LayerWeights(norms, None, {}, Mlp(None, None), {})  # type: ignore[arg-type]
    pool = shaped(4096, 12, 2, 2, BLOCK_SIZE, 256, dtype=model.dtype)
    num_blocks = -(-shape.state_bytes // (pool[0].numel() * pool.element_size()))
    made = shaped(NUM_ROWS, shape.input_width, dtype=model.dtype)
    batch = AttentionBatch(ints(NUM_ROWS + 1), ints(NUM_ROWS), ints(1, 1), longs(NUM_ROWS))
    tables = StateTables(ints(NUM_ROWS, 3, num_blocks), ints(NUM_ROWS))
    RecurrentLayers(shape, 1e-6, [layer]).mix(0, layer, made, batch, tables, pool)


def launch_sampling(model: Model) -> None:
    logits, params = floats(NUM_ROWS, model.vocab_size), longs(NUM_ROWS, 7)
    num_words = -(-model.vocab_size // 32)
    changed = launches.change(
        logits,
        ints(NUM_ROWS),
        MaskInputs(ints(NUM_ROWS), ints(NUM_ROWS, num_words)),
        EditInputs(ints(4, NUM_ROWS + 1), ints(1), floats(1), floats(NUM_ROWS)),
        [EditKind.BIAS],
    )
    tokens = ints(NUM_ROWS)
    launches.choose(changed, None, params, tokens)  # as it is of the logits themselves
    summaries = shaped(NUM_ROWS, 3, dtype=torch.float64)
    found = Results(tokens, summaries, ints(NUM_ROWS, 20), floats(NUM_ROWS, 20), floats(1))
    ranks = RankInputs(ints(NUM_ROWS, 2), ints(NUM_ROWS + 1), ints(1))
    launches.rank(logits, ints(NUM_ROWS), ranks, found)


CODED = (  # GGUF's Q4_K and Q6_K, and GPTQ
    Coding(4, 32, 0, ScaleType.TWO_LEVELS, True),
    Coding(8, 16, 128, ScaleType.TWO_LEVELS),
    Coding(4, 128, 0, ScaleType.FLOAT32, True),
)

_LLAMA = (
    partial(launch_sampling, LLAMA_8B),
    partial(launch_quantised, LLAMA_8B),
    partial(launch_coded_kv, LLAMA_8B),
    partial(launch_layer, LLAMA_8B),
    partial(launch_adapters, LLAMA_8B),
)
_STATES = partial(launch_states, QWEN3_30B)
_LATENT = partial(launch_latent, DEEPSEEK_V3)
_GPT_OSS = (partial(launch_layer, GPT_OSS_120B), partial(launch_experts, GPT_OSS_120B))
# Compute capability |-> what is launched there.
SERVED = {
    80: (
        *_LLAMA,
        partial(launch_layer, GEMMA2_9B),
        partial(launch_experts, QWEN3_30B),
        _STATES,
        _LATENT,
    ),
    90: (
        *_LLAMA,
        partial(launch_layer, UNEVEN),
        partial(launch_experts, UNEVEN),
        partial(launch_adapters, UNEVEN),
        partial(launch_latent, UNEVEN_LATENT),
        _STATES,
        _LATENT,
        *_GPT_OSS,
    ),
    100: (*_LLAMA, partial(launch_experts, QWEN3_30B), _STATES, _LATENT),
}


class CompileOnly:
    """In place of Triton's driver: a GPU of some compute capability, on which nothing runs."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return self._capability  # each has kernels of its own

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


def compiled(capability: int, launch: Callable[[], None]) -> list[dict[str, Any]]:
    """What compiling for this capability makes of what is launched."""
    found = []
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        with redirect_stdout(StringIO()) as log:
            result = run(kernel, *args, grid=grid, warmup=True, **options)
        if log.getvalue():  # it was not compiled before
            found.append(figures(result, grid, log.getvalue()))

    driver.set_active(CompileOnly(capability))
    with patch.object(JITFunction, "run", compile_only):
        launch()
    return found


def figures(kernel: Any, grid: tuple[int, ...], log: str) -> dict[str, Any]:
    """`log`: of ptxas."""
    (registers,) = re.findall(r"Used (\d+) registers", log)
    ((stores, loads),) = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    return {
        "kernel": kernel.name,
        "grid": grid,
        "warps": kernel.metadata.num_warps,
        "registers": int(registers),
        "spilled_bytes": int(stores) + int(loads),
        "shared_bytes": kernel.metadata.shared,
        "uses_tensor_cores": re.search(r"\b(wg)?mma\.", kernel.asm["ptx"]) is not None,
        "fuses": "fma.rn.f" in kernel.asm["ptx"],
        "instructions": sorted(
            {*re.findall(r"\b(?:wgmma|mma|tcgen05\.mma)\.\S+", kernel.asm["ptx"])}
        ),
    }


def main() -> None:
    knobs.nvidia.dump_ptxas_log = True
    warnings.simplefilter("error")  # as they are in the tests that a GPU runs
    capability, only, found = int(sys.argv[1]), sys.argv[2], []
    for launch in SERVED[capability]:
        if only not in ("", launch.func.__name__):
            continue
        (model,) = launch.args
        found += [
            {"model": model.name, "is_float32": model.dtype == torch.float32, **one}
            for one in compiled(capability, launch)
        ]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
