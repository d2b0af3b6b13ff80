"""Packed matrices unpacked, from the description of their layout alone: csrc/linear."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.layers import torch_dtype
from pdserve.engine.native.linear import PANEL_OUTPUTS, PackedLinear, lanes_of_rows
from pdserve.model_files.coding import SUPER_INPUTS, Codes, Coding, ScaleType


def unpack(packed: PackedLinear) -> Tensor:
    """Return the weights as [num_out, num_in] float32."""
    half = packed.num_out // 2 if packed.is_gated else packed.num_out
    num_panels = -(-half // PANEL_OUTPUTS) * (2 if packed.is_gated else 1)
    panels = packed.weights.view(num_panels, -1)  # rows of bytes
    coding = packed.form.coding
    if coding is not None:
        codes = _Panels(panels.numpy(), coding, packed.num_in).codes()
        rows = torch.from_numpy(codes.decoded())
    else:
        rows = _plain(packed, panels)
    return rows[lanes_of_rows(packed.num_out, is_gated=packed.is_gated)]


def _plain(packed: PackedLinear, panels: Tensor) -> Tensor:
    inputs = 32 // packed.form.bits  # of an output, side by side
    if packed.form.dtype == "int8":
        values = panels.float() - 128
    else:
        values = panels.view(torch_dtype(packed.form.dtype)).float()
    groups = values.view(len(panels), -1, PANEL_OUTPUTS, inputs)
    rows = groups.permute(0, 2, 1, 3).reshape(len(panels) * PANEL_OUTPUTS, -1)[:, : packed.num_in]
    return rows if packed.scales is None else rows * packed.scales[:, None]


class _Panels:
    """Reads coded panels from their starts on."""

    def __init__(self, panels: NDArray[np.uint8], coding: Coding, num_in: int) -> None:
        self._panels = panels
        self._coding = coding
        self._num_in = num_in
        self._place = 0

    def codes(self) -> Codes:
        coding, num_in = self._coding, self._num_in
        counts: list[tuple[int, Any]] = [(num_in // coding.group, coding.scale.dtype)]
        if coding.scale.has_supers:
            counts.insert(0, (-(-num_in // SUPER_INPUTS), np.float16))
        pairs = []
        for count, dtype in counts:
            is_shared = coding.scale is ScaleType.NESTED and dtype is np.float16
            has_minimums = coding.has_minimums and not is_shared
            numbers = self._take(count, dtype)
            pairs.append((numbers, self._take(count, dtype) if has_minimums else None))
        self._place += -self._place % 64
        blocks = [self._block() for _ in range(-(-num_in // 32))]
        assert self._place == self._panels.shape[1], "all of it"
        supers = pairs[0] if len(pairs) == 2 else (None, None)
        return Codes(coding, np.concatenate(blocks, axis=1)[:, :num_in], *pairs[-1], *supers)

    def _block(self) -> NDArray[np.uint8]:
        """Codes of 32 inputs: [lanes, 32]."""
        upper = self._coding.bits - 4
        if upper == 4:
            return self._units(8)
        both = self._units(4)
        codes = np.concatenate([both & 15, both >> 4], axis=1)
        if upper:
            lines = self._units(upper).reshape(len(codes), upper, 1, 4)
            shifts = np.arange(0, 8, upper, dtype=np.uint8)[:, None]
            codes |= (lines >> shifts & ((1 << upper) - 1)).reshape(-1, 32) << 4
        return codes

    def _units(self, count: int) -> NDArray[np.uint8]:
        """Cache lines of 4 inputs of each output: [lanes, 4 * count]."""
        words = self._take(count, np.uint32)
        return np.ascontiguousarray(words).view(np.uint8)

    def _take(self, count: int, dtype: Any) -> NDArray[Any]:
        """The next rows of lanes of each panel: [lanes, count]."""
        end = self._place + count * PANEL_OUTPUTS * np.dtype(dtype).itemsize
        rows = np.ascontiguousarray(self._panels[:, self._place : end]).view(dtype)
        self._place = end
        lanes: NDArray[Any] = rows.reshape(-1, count, PANEL_OUTPUTS).swapaxes(1, 2)
        return lanes.reshape(-1, count)
