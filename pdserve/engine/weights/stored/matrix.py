"""A quantised matrix as its file has it: what readers of formats make, and what is decoded here.

    weight = rounded(scale * (code - zero)) + offset

in float32, operation by operation, and rounded once to the type in which the format's own library
has the result. That is also what the library computes: a scale of 16 bits times such a difference
is exact in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pdserve.engine.weights.stored.tensors import Part, StoredTensor
from pdserve.model_files.coding import Codes, Coding, Rounded, ScaleType

_WIDTHS: Final = {2: 4, 3: 4, 4: 4, 5: 5, 6: 6, 7: 8, 8: 8}  # bits |-> of packed codes
_GROUPS: Final = (256, 128, 64, 32, 16)
_HALVES: Final = (torch.float16, torch.bfloat16)  # products of codes with these are exact


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """Codes, and groups of them that share a scale. Nothing is read before a part is asked for."""

    shape: tuple[int, int]  # outputs, inputs
    codes: StoredTensor  # [outputs, inputs]: integers, or floats of 8 bits
    scales: StoredTensor  # [groups of outputs, groups of inputs]
    group: tuple[int, int]  # outputs and inputs that share a scale; 0: all
    zeros: StoredTensor | int = 0  # of each group, as `scales`, or of all
    table: Tensor | None = None  # float32: what a code stands for; None: itself
    group_of: Tensor | None = None  # of each input (int64); None: they are in order
    rounded: torch.dtype = torch.float32
    offset: float = 0.0

    def __getitem__(self, part: Part) -> Tensor:
        """See `StoredTensor`: float32."""
        rows, columns = ranges(part, self.shape)
        cut = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
        codes = self.codes[cut]
        weights = codes.float() if self.table is None else self.table[codes.int()]
        if not isinstance(self.zeros, int):
            weights -= self._of_each(self.zeros, rows, columns)
        elif self.zeros:
            weights -= self.zeros
        weights *= self._of_each(self.scales, rows, columns)
        if self.rounded != torch.float32:
            weights = weights.to(self.rounded).float()
        return weights + self.offset if self.offset else weights

    @property
    def coding(self) -> Coding | None:
        """See `CodedTensor`."""
        bits = _WIDTHS.get(self.codes.bits) if isinstance(self.codes, Words) else None
        rows, inputs = self.group
        group = inputs or next((size for size in _GROUPS if self.shape[1] % size == 0), 0)
        is_plain = self.table is None and self.group_of is None and not self.offset
        is_exact = isinstance(self.scales, Tensor) and self.scales.dtype in _HALVES
        if bits is None or group not in _GROUPS or rows != 1 or not is_plain or not is_exact:
            return None
        rounded = Rounded(str(self.rounded).removeprefix("torch."))
        if isinstance(self.zeros, int):
            return Coding(bits, group, self.zeros, ScaleType.FLOAT32, False, rounded)
        return Coding(bits, group, 0, ScaleType.FLOAT32, True, rounded)

    def coded(self, part: Part) -> Codes:
        """See `CodedTensor`."""
        coding = self.coding
        assert coding is not None, "as planned"
        rows, columns = ranges(part, self.shape)
        cut = slice(rows.start, rows.stop)
        size = self.group[1] or self.shape[1]
        groups = slice(columns.start // size, -(-columns.stop // size))
        each = 1 if self.group[1] else len(columns) // coding.group
        scales = self.scales[cut, groups].float().repeat_interleave(each, dim=1)
        minimums = None
        if not isinstance(self.zeros, int):
            minimums = scales * self.zeros[cut, groups].float().repeat_interleave(each, dim=1)
        return Codes(
            coding,
            self.codes[cut, slice(columns.start, columns.stop)].numpy(),
            scales.numpy(),
            None if minimums is None else minimums.numpy(),
        )

    def bad_row(self) -> int | None:
        """See `ScaledTensor`."""
        group = self.bad_group()
        return None if group is None else group[0] * self.group[0]

    def bad_group(self) -> tuple[int, int] | None:
        """The first group of outputs, and of inputs, whose scale is not finite."""
        bad = ~self.scales[()].float().isfinite()
        if not bad.any():
            return None
        row, column = bad.nonzero()[0].tolist()
        return row, column

    def _of_each(self, numbers: StoredTensor, rows: range, columns: range) -> Tensor:
        """A group's number for each code of a part, or so that it is broadcast to them."""
        high, wide = (size or all_ for size, all_ in zip(self.group, self.shape, strict=True))
        first_row, row_of = _groups(rows, high)
        if self.group_of is not None:
            row_groups = slice(first_row, int(row_of[-1]) + first_row + 1 if len(rows) else 0)
            of_columns = self.group_of[columns.start : columns.stop]
            return numbers[row_groups, :].float()[row_of][:, of_columns]
        first, column_of = _groups(columns, wide)
        if not len(rows) or not len(columns):
            return torch.empty(len(rows), len(columns))
        last_row, last = first_row + int(row_of[-1]), first + int(column_of[-1])
        some = numbers[first_row : last_row + 1, first : last + 1].float()
        return some[row_of][:, column_of]


@dataclass(frozen=True, slots=True)
class Words:
    """Unsigned numbers, packed into words along the last dimension of a tensor."""

    words: Tensor  # [lines, words] int32 or uint8
    bits: int  # of a number
    shape: tuple[int, int]  # of the numbers
    order: tuple[int, ...] = ()  # of a word's numbers, from its lowest bits up; (): as they are
    is_transposed: bool = False  # a line is a column of the numbers
    is_dense: bool = False  # numbers may cross words

    def __getitem__(self, part: Part) -> Tensor:
        """See `StoredTensor`: uint8."""
        rows, columns = ranges(part, self.shape)
        if self.is_transposed:
            return self._numbers(columns, rows).T
        return self._numbers(rows, columns)

    @property
    def _word_bits(self) -> int:
        return self.words.element_size() * 8

    def _numbers(self, lines: range, along: range) -> Tensor:
        if self.is_dense:
            each, period = 32, self.bits  # numbers, and the words that hold them
        else:
            each, period = self._word_bits // self.bits, 1
        first, last = along.start // each, -(-along.stop // each)
        words = self.words[lines.start : lines.stop, first * period : last * period]
        if self.is_dense:
            missing = (last - first) * period - words.shape[1]
            words = torch.nn.functional.pad(words, (0, missing))
            numbers = _across(words.reshape(len(lines), -1, period), self.bits)
        else:
            order = self.order or range(each)
            shifts = torch.empty(each, dtype=words.dtype)
            shifts[list(order)] = torch.arange(each, dtype=words.dtype) * self.bits
            numbers = words[:, :, None] >> shifts & (1 << self.bits) - 1
        start = along.start - first * each
        found = numbers.to(torch.uint8).reshape(len(lines), -1)
        return found[:, start : start + len(along)]


@dataclass(frozen=True, slots=True)
class Folded:
    """A matrix whose groups run on from one row to the next: it is stored as one row."""

    row: StoredTensor  # [1, all]
    shape: tuple[int, int]

    def __getitem__(self, part: Part) -> Tensor:
        """See `StoredTensor`."""
        rows, columns = ranges(part, self.shape)
        width = self.shape[1]
        some = self.row[0:1, rows.start * width : rows.stop * width].reshape(len(rows), width)
        return some[:, columns.start : columns.stop]

    def bad_row(self) -> int | None:
        """See `ScaledTensor`."""
        if not isinstance(self.row, StoredMatrix) or (group := self.row.bad_group()) is None:
            return None
        return group[1] * self.row.group[1] // self.shape[1]


def ranges(part: Part, shape: tuple[int, ...]) -> tuple[range, range]:
    """The rows and columns that a part is."""
    cuts = (*(part if isinstance(part, tuple) else (part,)), slice(None), slice(None))
    return range(*cuts[0].indices(shape[0])), range(*cuts[1].indices(shape[1]))


def _groups(of: range, size: int) -> tuple[int, Tensor]:
    """The first group of some rows or columns, and the group of each, counted from that one."""
    first = of.start // size
    return first, torch.arange(of.start, of.stop) // size - first


def _across(words: Tensor, bits: int) -> Tensor:
    """Numbers of which one begins where the other ends: [..., bits] int32 -> [..., 32]."""
    wide = words.long() & 0xFFFFFFFF
    starts = torch.arange(32) * bits
    word, shift = starts // 32, starts % 32
    following = wide[..., (word + 1).clamp(max=bits - 1)] << 32 - shift
    return (wide[..., word] >> shift | following) & (1 << bits) - 1
