"""Layers with a state on a GPU, between their two products (`models/recurrent.py`).

A state is in the pool as CPUs have it, so either goes on with what the other has left: here the
matrix of a head takes in every token, and nothing is beside it.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
from torch import Tensor

from pdserve.engine.attention import AttentionBatch
from pdserve.engine.cuda.layers.recurrent_kernels import (
    convolve_rows,
    go_on_with_states,
    leave_nothing_beside,
    norm_and_weigh,
)
from pdserve.engine.models.parameters import LayerWeights
from pdserve.engine.models.recurrent import CHUNK, RecurrentShape
from pdserve.engine.steps.batch import StateTables

_CHANNELS: Final = 256  # that a program convolves
_COLUMNS: Final = 32  # of a matrix, that a program has in registers
_BESIDE: Final = 1024  # numbers that a program writes at a time


class RecurrentLayers:
    """Of one model."""

    def __init__(self, shape: RecurrentShape, norm_eps: float, layers: list[LayerWeights]) -> None:
        self._shape = shape
        self._norm_eps = norm_eps
        self._number = {layer: number for number, layer in enumerate(sorted(shape.layers))}
        self._taps = {
            layer: _taps(shape, layers[layer].norms["convolution"]) for layer in shape.layers
        }

    def mix(
        self,
        index: int,
        layer: LayerWeights,
        rows: Tensor,
        attention: AttentionBatch,
        tables: StateTables,
        kv_pool: Tensor,
    ) -> Tensor:
        """Go on with the states of a step's requests, which are in blocks of the pool.

        Args:
            index: of the layer in the model.
            layer: its weights.
            rows: [num_rows, input_width], as `recurrent_in` makes them; contiguous.
            attention: of the step.
            tables: on the GPU.
            kv_pool: read and written; its blocks are of whole float32 numbers.

        Returns:
            [num_rows, values_width], dtype of `rows`.
        """
        shape, pool = self._shape, _floats(kv_pool)
        num_rows, width = rows.shape
        if width != shape.input_width or not rows.is_contiguous():
            raise ValueError(f"rows of {width} numbers for {shape.input_width}, contiguous")
        num_requests, _, num_blocks = tables.blocks.shape
        if num_blocks * pool.shape[1] * 4 < shape.state_bytes or not tables.blocks.is_contiguous():
            raise ValueError(f"{num_blocks} blocks for a state of {shape.state_bytes} bytes")
        groups, channels = shape.num_groups, shape.group_channels
        num_inputs = (shape.kernel - 1) * channels
        mixed = torch.empty((num_rows, groups, channels), dtype=torch.float32, device=rows.device)
        out = torch.empty((num_rows, shape.values_width), dtype=rows.dtype, device=rows.device)
        if not num_rows:
            return out
        of_step = (tables.blocks, num_blocks, attention.query_start, attention.context_lens)
        first = self._number[index] * groups * shape.group_state
        convolve_rows[(num_requests, groups, -(-channels // _CHANNELS))](
            rows,
            self._taps[index],
            pool,
            *of_step,
            tables.kept_after,
            first,
            mixed,
            width,
            GROUP_STATE=shape.group_state,
            CHANNELS=channels,
            GATES=shape.group_size * shape.value_dim,
            KERNEL=shape.kernel,
            BLOCK_FLOATS=pool.shape[1],
            BLOCK=_CHANNELS,
            enable_fp_fusion=True,
            num_warps=4,
        )
        norms, values = layer.norms, int(triton.next_power_of_2(shape.value_dim))
        made = torch.empty_like(out, dtype=torch.float32)
        columns = min(values, _COLUMNS)
        go_on_with_states[(num_requests, shape.num_values, -(-shape.value_dim // columns))](
            rows,
            mixed,
            norms["decay"],
            norms["decay_bias"],
            pool,
            *of_step,
            tables.kept_after,
            first,
            made,
            width,
            shape.key_dim**-0.5,
            GROUP_STATE=shape.group_state,
            GROUP_SIZE=shape.group_size,
            KEY_DIM=shape.key_dim,
            VALUE_DIM=shape.value_dim,
            INPUTS=num_inputs,
            CHUNK=CHUNK,
            BLOCK_FLOATS=pool.shape[1],
            KEYS=int(triton.next_power_of_2(shape.key_dim)),
            VALUES=columns,
            enable_fp_fusion=True,
            num_warps=4,
        )
        leave_nothing_beside[(num_requests, groups, 2)](
            pool,
            tables.blocks,
            num_blocks,
            tables.kept_after,
            first,
            GROUP_STATE=shape.group_state,
            GROUP_SIZE=shape.group_size,
            KEY_DIM=shape.key_dim,
            VALUE_DIM=shape.value_dim,
            BESIDE=num_inputs + shape.matrix_numbers,
            CHUNK=CHUNK,
            BLOCK_FLOATS=pool.shape[1],
            BLOCK=_BESIDE,
            enable_fp_fusion=True,
            num_warps=4,
        )
        norm_and_weigh[(num_rows, shape.num_values)](
            rows,
            made,
            norms["value_norm"],
            out,
            width,
            self._norm_eps,
            CHANNELS=channels,
            GROUP_SIZE=shape.group_size,
            VALUE_DIM=shape.value_dim,
            VALUES=values,
            enable_fp_fusion=True,
            num_warps=1,
        )
        return out


def _floats(kv_pool: Tensor) -> Tensor:
    """The pool as [num_blocks, numbers of a block] float32.

    Raises:
        ValueError: its blocks are not of whole numbers.
    """
    block_bytes = kv_pool[0].numel() * kv_pool.element_size()
    if block_bytes % 4 or not kv_pool.is_contiguous():
        raise ValueError(f"blocks of {block_bytes} bytes hold no float32 numbers")
    return kv_pool.view(len(kv_pool), -1).view(torch.float32)


def _taps(shape: RecurrentShape, convolution: Tensor) -> Tensor:
    """[channels, 1, kernel] of a file, group behind group: [num_groups, kernel, channels]."""
    weight = convolution.view(-1, shape.kernel)
    dims = [shape.key_dim, shape.key_dim, shape.group_size * shape.value_dim]
    parts = torch.split(weight, [shape.num_groups * dim for dim in dims])
    of_groups = [part.reshape(shape.num_groups, -1, shape.kernel) for part in parts]
    return torch.cat(of_groups, dim=1).transpose(1, 2).contiguous()
