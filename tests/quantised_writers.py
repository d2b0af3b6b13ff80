"""What quantising libraries make of matrices: random codes and scales, and what they stand for.

Packing and decoding are written from the formats, in numpy, and share nothing with what reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
Random = np.random.Generator
# (random, outputs, inputs) -> tensors by what follows the module's name, and the weights
Write = Callable[[Random, int, int], tuple[dict[str, Tensor], Array]]


# ---- packing -------------------------------------------------------------------------------------


def words(numbers: Array, bits: int) -> Array:
    """Along the last dimension, each number where the one before ends: [lines, n] -> int32."""
    places = np.arange(bits)
    stream = (numbers[:, :, None].astype(np.int64) >> places & 1).reshape(len(numbers), -1)
    missing = -stream.shape[1] % 32
    stream = np.pad(stream, ((0, 0), (0, missing))).astype(np.uint8)
    return np.ascontiguousarray(np.packbits(stream, axis=1, bitorder="little")).view(np.int32)


def sparse_words(numbers: Array, bits: int) -> Array:
    """32 // bits numbers a word, the rest of it unused."""
    each = 32 // bits
    padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % each))).astype(np.int64)
    places = padded.reshape(len(numbers), -1, each) << np.arange(each) * bits
    return places.sum(axis=2).astype(np.uint32).view(np.int32)


def tensor_of(array: Array) -> Tensor:
    """In its own memory, in order."""
    return torch.from_numpy(np.ascontiguousarray(array))


def scales_of(random: Random, *shape: int, size: float = 0.02) -> Array:
    """Float16, some negative."""
    signs = random.choice([-1.0, 1.0, 1.0], shape)
    return (random.uniform(0.2, 1.0, shape) * size * signs).astype(np.float16)


# ---- AWQ and GPTQ --------------------------------------------------------------------------------


def awq_of(group: int) -> Write:
    """Words hold columns 0 2 4 6 1 3 5 7 of eight outputs, from the lowest nibble up."""

    def write(random: Random, num_out: int, num_in: int) -> tuple[dict[str, Tensor], Array]:
        size = group if group > 0 else num_in
        codes = random.integers(0, 16, (num_in, num_out))
        zeros = random.integers(0, 16, (num_in // size, num_out))
        scales = scales_of(random, num_in // size, num_out)
        weights = np.empty((num_in, num_out), np.float16)
        for i in range(num_in):
            difference = (codes[i] - zeros[i // size]).astype(np.float16)
            weights[i] = difference * scales[i // size]

        def shuffled(numbers: Array) -> Array:
            eights = numbers.reshape(len(numbers), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
            return words(eights.reshape(numbers.shape), 4)

        made = {
            "qweight": tensor_of(shuffled(codes)),
            "qzeros": tensor_of(shuffled(zeros)),
            "scales": tensor_of(scales),
        }
        return made, weights.T

    return write


def gptq_of(
    bits: int,
    group: int,
    *,
    is_first: bool = True,
    is_shuffled: bool = False,
    has_order: bool = True,
) -> Write:
    """Words hold inputs; zero points are one less in the first version."""

    def write(random: Random, num_out: int, num_in: int) -> tuple[dict[str, Tensor], Array]:
        size = group if group > 0 else num_in
        codes = random.integers(0, 1 << bits, (num_out, num_in))
        zeros = random.integers(0, 1 << bits, (num_in // size, num_out))
        scales = scales_of(random, num_in // size, num_out, size=0.3 / (1 << bits))
        # From whole words, as the library does: a zero point of 0 takes 1 from the next one.
        ones = sum(1 << bit for bit in range(0, 32, bits)) if is_first else 0
        g_idx = np.arange(num_in) // size
        if is_shuffled:
            random.shuffle(g_idx)
        weights = np.empty((num_out, num_in), np.float16)
        for i in range(num_in):
            difference = (codes[:, i] - zeros[g_idx[i]]).astype(np.float16)
            weights[:, i] = difference * scales[g_idx[i]]
        made = {
            "qweight": tensor_of(words(codes, bits).T),
            "qzeros": tensor_of(words(zeros, bits) - np.int32(ones)),
            "scales": tensor_of(scales),
            **({"g_idx": tensor_of(g_idx.astype(np.int32))} if has_order else {}),
        }
        return made, weights

    return write


# ---- compressed-tensors --------------------------------------------------------------------------


def packed_of(
    bits: int, group: int, *, has_zeros: bool, is_loose: bool = False, is_shuffled: bool = False
) -> Write:
    """Codes along the inputs and zero points along the outputs, and both with half of all added."""
    pack = sparse_words if is_loose else words

    def write(random: Random, num_out: int, num_in: int) -> tuple[dict[str, Tensor], Array]:
        size = group if group > 0 else num_in
        shape = (num_out, num_in // size)
        codes = random.integers(0, 1 << bits, (num_out, num_in))
        zeros = random.integers(0, 1 << bits, shape)
        scales = torch.from_numpy(scales_of(random, *shape, size=0.3 / (1 << bits))).bfloat16()
        g_idx = np.arange(num_in) // size
        if is_shuffled:
            random.shuffle(g_idx)
        zero = zeros[:, g_idx] if has_zeros else 1 << bits - 1
        difference = torch.from_numpy(codes - zero).bfloat16()
        made = {
            "weight_packed": tensor_of(pack(codes, bits)),
            "weight_scale": scales,
            "weight_shape": torch.tensor([num_out, num_in]),
            # Symmetric ones may have zero points too, of no meaning.
            "weight_zero_point": tensor_of(pack(zeros.T, bits).T),
        }
        if is_shuffled:
            made["weight_g_idx"] = tensor_of(g_idx.astype(np.int32))
        return made, (difference * scales[:, g_idx]).float().numpy()

    return write


def scaled_of(
    dtype: torch.dtype,
    rows: int,
    columns: int,
    *,
    names: tuple[str, str] = ("weight", "weight_scale"),
    of_scales: torch.dtype = torch.bfloat16,
    zeros: str = "",
    rounded: torch.dtype = torch.float32,
    extra: dict[str, Tensor] | None = None,
) -> Write:
    """Numbers of 8 bits, with a scale for so many rows and columns; 0: all."""

    def write(random: Random, num_out: int, num_in: int) -> tuple[dict[str, Tensor], Array]:
        high, wide = rows or num_out, columns or num_in
        shape = (-(-num_out // high), -(-num_in // wide))
        codes = torch.from_numpy(random.integers(-100, 100, (num_out, num_in))).float()
        stored = (codes / 50 if dtype.is_floating_point else codes).to(dtype)
        scales = torch.from_numpy(random.uniform(0.5, 1.5, shape)).float()
        scales = (scales * (0.1 if dtype.is_floating_point else 0.002)).to(of_scales)
        moved = torch.from_numpy(random.integers(-9, 9, shape)).to(torch.int8)

        def spread(numbers: Tensor) -> Tensor:
            tall = numbers.float().repeat_interleave(high, 0)[:num_out]
            return tall.repeat_interleave(wide, 1)[:, :num_in]

        values = stored.float() - (spread(moved) if zeros else 0)
        weights = (values * spread(scales)).to(rounded).float()
        stored_scales = scales.reshape(-1) if shape == (1, 1) else scales
        more = {name: value.clone() for name, value in (extra or {}).items()}
        made = {names[0]: stored, names[1]: stored_scales} | more
        return (made | {zeros: moved} if zeros else made), weights.numpy()

    return write


# ---- FP4 -----------------------------------------------------------------------------------------

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def fp4_of(group: int, *, is_modelopt: bool = False) -> Write:
    """Of two numbers in a byte, the first is in the low bits."""

    def write(random: Random, num_out: int, num_in: int) -> tuple[dict[str, Tensor], Array]:
        codes = random.integers(0, 16, (num_out, num_in))
        shape = (num_out, num_in // group)
        packed = tensor_of((codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8))
        made = {"weight" if is_modelopt else "weight_packed": packed}
        if group == 32:
            exponents = random.integers(118, 124, shape).astype(np.uint8)
            made["weight_scale"] = tensor_of(exponents)
            scales = np.exp2(exponents.astype(np.float32) - 127)
        else:
            own = torch.from_numpy(random.uniform(16, 448, shape)).to(torch.float8_e4m3fn)
            shared = np.float32(random.uniform(4e-4, 6e-4) if is_modelopt else 2e3)
            made["weight_scale"] = own
            name = "weight_scale_2" if is_modelopt else "weight_global_scale"
            made[name] = torch.tensor(shared) if is_modelopt else torch.tensor([shared])
            wide = own.float().numpy()
            scales = wide * shared if is_modelopt else wide / shared
            if not is_modelopt:
                made["input_global_scale"] = torch.tensor([100.0])
        weights = torch.from_numpy(E2M1[codes] * np.repeat(scales, group, axis=1))
        return made, (weights if is_modelopt else weights.bfloat16()).float().numpy()

    return write


# ---- bitsandbytes --------------------------------------------------------------------------------


def blocks_of(kind: str, *, is_nested: bool = False, size: int = 64) -> Write:
    """Of two numbers in a byte, the first is in the high bits; blocks run on over rows."""

    def write(random: Random, num_out: int, num_in: int) -> tuple[dict[str, Tensor], Array]:
        count = num_out * num_in
        num_blocks = -(-count // size)
        codes = random.integers(0, 16, count)
        table = np.sort(random.uniform(-1, 1, 16)).astype(np.float32)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": size, "dtype": "bfloat16"}
        state["shape"] = [num_out, num_in]
        made = {"weight": tensor_of((codes[0::2] << 4 | codes[1::2]).astype(np.uint8)[:, None])}
        made["weight.quant_map"] = tensor_of(table)
        if is_nested:
            bytes_ = random.integers(0, 256, num_blocks).astype(np.uint8)
            table_2 = np.sort(random.uniform(-1, 1, 256)).astype(np.float32)
            absmax_2 = random.uniform(0.05, 0.1, -(-num_blocks // 256)).astype(np.float32)
            offset = 0.3
            absmax = table_2[bytes_] * absmax_2[np.arange(num_blocks) // 256] + np.float32(offset)
            made["weight.absmax"] = tensor_of(bytes_)
            made["weight.nested_absmax"] = tensor_of(absmax_2)
            made["weight.nested_quant_map"] = tensor_of(table_2)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        else:
            absmax = random.uniform(0.2, 0.5, num_blocks).astype(np.float32)
            made["weight.absmax"] = tensor_of(absmax)
        text = json.dumps(state).encode()
        made[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text)).to(torch.uint8)
        weights = table[codes] * absmax[np.arange(count) // size]
        rounded = torch.from_numpy(weights).bfloat16().float().numpy()
        return made, rounded.reshape(num_out, num_in)

    return write


def rows_of_127(random: Random, num_out: int, num_in: int) -> tuple[dict[str, Tensor], Array]:
    """The largest of a row is 127."""
    codes = random.integers(-127, 128, (num_out, num_in)).astype(np.int8)
    largest = random.uniform(0.2, 0.5, num_out).astype(np.float32)
    made = {"weight": tensor_of(codes), "SCB": tensor_of(largest)}
    made["weight_format"] = torch.tensor(0, dtype=torch.uint8)
    return made, codes * (largest / np.float32(127))[:, None]
