"""Compiles every Triton kernel for GPUs that need not be there, one of each compute capability.

Prints as JSON what came out: capability |-> one entry a kernel and shape. A process of its own: in
the tests' process the kernels are interpreted.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pdserve.engine.cuda.attention import triton_kernels
from pdserve.engine.cuda.attention.split_keys import MIN_SPLIT_KEYS, NUM_SPLITS
from pdserve.engine.cuda.layers import expert_kernels, row_kernels
from pdserve.engine.cuda.sampling import choice_kernels, edit_kernels, rank_kernels

POINTERS = {
    "i64": "slot_mapping params order places",
    "fp64": "summaries",
    "fp32": "residual partial_out partial_sums cos sin logits changed amounts factors top_logits "
    "listed_logits",
    "i32": "query_start context_lens block_tables rows masks words starts token_ids candidates "
    "ranked listed_starts listed_ids keys key_ids top_ids",
}
OF_KERNELS = {  # where a name means something else
    "spread_table_rows": {"tables": "*i32", "width": "*i32", "out": "*i32"},
    "take_sampled_tokens": {"token_ids": "*i64", "sampled": "*i32"},
    "multiply_experts": {"starts": "*i64"},
    "add_up_experts": {"made": "*fp32", "weights": "*fp32", "out": "*fp32"},
}
SCALARS = {"eps": "fp32", "scale_log2": "fp32"} | dict.fromkeys(
    ("num_requests", "num_tokens", "window", "num_words", "vocab_size", "kind", "width"), "i32"
)
POWER_OF_TWO = {"block_stride", "token_stride"}  # divisible by 16, as Triton finds when launching


@dataclass(frozen=True)
class Shape:
    dtype: str  # Triton's name
    head_dim: int
    group: int
    num_keys: int  # of a tile, as triton_attention has it


# compute capability |-> what is compiled for it
SHAPES = {
    80: [Shape("bf16", 80, 5, 64)],
    90: [Shape("bf16", 128, 4, 64), Shape("fp32", 64, 2, 64)],
    100: [Shape("bf16", 128, 4, 64)],
}


def kind(kernel: str, name: str, dtype: str) -> str:
    if name in (own := OF_KERNELS.get(kernel, {})):
        return own[name]
    for pointed, names in POINTERS.items():
        if name in names.split():
            return f"*{pointed}"
    if name in SCALARS or name.endswith("_stride"):
        return SCALARS.get(name, "i32")
    return f"*{dtype}"


def constants(kernel: str, shape: Shape) -> dict[str, Any]:
    padded_group = triton.next_power_of_2(shape.group)
    known = {
        "NUM_HEADS": 8 * shape.group,
        "NUM_KV_HEADS": 8,
        "GROUP": shape.group,
        "PADDED_GROUP": padded_group,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_SIZE": 16,
        "BLOCK_Q": 64 // padded_group,
        "BLOCK_M": max(16, padded_group),
        "BLOCK_N": shape.num_keys,
        "BLOCK_D": triton.next_power_of_2(shape.head_dim),
        "NUM_SPLITS": NUM_SPLITS,
        "MIN_SPLIT_KEYS": MIN_SPLIT_KEYS,
        "SIZE": 8 * shape.group * shape.head_dim,
        "HAS_DELTA": True,
        "HAS_QK_NORM": True,
        "NUM_EXPERTS": 100,
        "NUM_CHOSEN": 8,
        "NUM_OUT": 8 * shape.group * shape.head_dim,
        "NUM_IN": 768,
        "IS_IN_PLACE": False,
        "BLOCK_EXPERTS": 128,
        "HAS_MASKS": True,
        "HAS_ROWS": True,
        "SEARCH_BLOCK": 512,
    }
    if kernel == "multiply_experts":  # as the launcher of experts.py has it
        is_half = shape.dtype != "fp32"
        known |= {
            "BLOCK_M": 64,
            "BLOCK_N": 128 if is_half else 64,
            "BLOCK_K": 64 if is_half else 32,
        }
    return known


SAMPLING = {"mask_rows": 8, "edit_rows": 4, "choose_tokens": 16, "rank_logits": 16}  # warps
LANES = {
    "silu_mul_rows": 1024,
    "add_up_experts": 1024,
    "spread_table_rows": 1024,
    "take_sampled_tokens": 256,
    "mask_rows": 4096,
    "edit_rows": 512,
    "choose_tokens": 4096,
    "rank_logits": 4096,
}


def block(kernel: str, shape: Shape) -> int:
    """What the launchers of rows.py and experts.py give as BLOCK."""
    if kernel == "add_rms_norm_rows":
        return int(triton.next_power_of_2(8 * shape.group * shape.head_dim))
    if kernel in LANES:
        return LANES[kernel]
    return int(triton.next_power_of_2(shape.head_dim // 2))


def compiled(kernel: Any, shape: Shape, capability: int) -> dict[str, Any]:
    known = constants(kernel.__name__, shape) | {"BLOCK": block(kernel.__name__, shape)}
    names = [param.name for param in kernel.params]
    constexprs = {param.name: known[param.name] for param in kernel.params if param.is_constexpr}
    signature = {
        name: "constexpr" if name in constexprs else kind(kernel.__name__, name, shape.dtype)
        for name in names
    }
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name in POWER_OF_TWO
    }
    source = ASTSource(kernel, signature, constexprs, aligned)
    one_warp = kernel.__name__ in ("rotate_and_write_heads", "merge_splits")
    is_sampling = kernel.__name__ in SAMPLING
    options = {
        "num_warps": 1 if one_warp else SAMPLING.get(kernel.__name__, 4),
        "num_stages": 1 if is_sampling else 2,
        "enable_fp_fusion": not is_sampling,
    }
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {
        "kernel": kernel.__name__,
        "shape": str(shape),
        "shared_bytes": result.metadata.shared,
        "cubin_bytes": len(result.asm["cubin"]),
        "uses_tensor_cores": "mma" in result.asm["ptx"],
        "fuses": "fma.rn.f" in result.asm["ptx"],
    }


def main() -> None:
    kernels = [
        triton_kernels.attend_chunks,
        triton_kernels.attend_single_rows,
        triton_kernels.merge_splits,
        expert_kernels.add_up_experts,
        expert_kernels.multiply_experts,
        row_kernels.add_rms_norm_rows,
        row_kernels.silu_mul_rows,
        row_kernels.rotate_and_write_heads,
        row_kernels.spread_table_rows,
        row_kernels.take_sampled_tokens,
        edit_kernels.mask_rows,
        edit_kernels.edit_rows,
        choice_kernels.choose_tokens,
        rank_kernels.rank_logits,
    ]
    results = {
        capability: [
            compiled(kernel, shape, capability)
            for kernel in kernels
            for shape in (shapes[:1] if kernel.__name__ in SAMPLING else shapes)
        ]
        for capability, shapes in SHAPES.items()
    }
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
