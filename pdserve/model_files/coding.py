"""Weights as quantised files have them: one description for their readers and for packed matrices.

    weight = rounded(scale * (code - zero) - minimum)

in float32, operation by operation: with a scale, and perhaps a minimum, for each group of a row's
inputs. A reader makes `Codes` only if this gives the numbers that its format stands for, bit for
bit. If there are minimums, a scale times a code must be exact, since CPUs fuse operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

SUPER_INPUTS: Final = 256
_WIDTHS: Final = (4, 5, 6, 8)  # of packed codes, in bits
_BLOCK_INPUTS: Final = 32  # are packed together


class ScaleType(StrEnum):
    """What scales and minimums are stored as."""

    FLOAT16 = "float16"
    FLOAT32 = "float32"
    TWO_LEVELS = "two_levels"  # int8, times a float16 that 256 inputs share
    NESTED = "nested"  # likewise; minimums share it, and scale * code - minimum is int8 times it

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the number of one group."""
        return np.dtype("int8" if self.has_supers else self.value)

    @property
    def has_supers(self) -> bool:
        """Whether 256 inputs share a number."""
        return self in (ScaleType.TWO_LEVELS, ScaleType.NESTED)


class Rounded(StrEnum):
    """What weights are rounded to."""

    FLOAT32 = "float32"  # as they are
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True)
class Coding:
    """How the weights of a matrix are coded."""

    bits: int  # of a code, which has no sign
    group: int  # inputs that share a scale: 16 times a power of two, up to 256
    zero: int = 0
    scale: ScaleType = ScaleType.FLOAT16
    has_minimums: bool = False
    rounded: Rounded = Rounded.FLOAT32

    def __str__(self) -> str:
        """For people, as in `4 bits by 32`."""
        return f"{self.bits} bits by {self.group}"

    @property
    def unit(self) -> int:
        """Inputs that ranks do not divide."""
        return SUPER_INPUTS if self.scale.has_supers else self.group

    def num_bytes(self, num_out: int, num_in: int) -> int:
        """Size of a packed matrix, without the padding of outputs."""
        numbers = -(-num_in // self.group) * self.scale.dtype.itemsize * (1 + self.has_minimums)
        if self.scale.has_supers:
            shared = self.scale is ScaleType.NESTED or not self.has_minimums
            numbers += -(-num_in // SUPER_INPUTS) * (2 if shared else 4)
        blocks = -(-num_in // _BLOCK_INPUTS)
        numbers += -numbers % 4  # of 16 outputs, codes begin at a whole line
        return num_out * (blocks * self.bits * _BLOCK_INPUTS // 8 + numbers)


def on_device(coding: Coding) -> Coding:
    """Return the coding in which a GPU holds such weights, without loss: of 4 or of 8 bits."""
    return coding if coding.bits in (4, 8) else replace(coding, bits=8, zero=128)


def joined(codings: Iterable[Coding]) -> Coding | None:
    """Return the least coding that holds weights of all of these without loss; None: none does."""
    every = list(codings)
    lowest = max(each.zero for each in every)  # below 0
    highest = max((1 << each.bits) - 1 - each.zero for each in every)
    for bits in _WIDTHS:
        zero = 1 << bits - 1 if lowest else 0
        if lowest <= zero and highest < (1 << bits) - zero:
            break
    else:
        return None
    scales = {each.scale for each in every}
    rounded, *others = {each.rounded for each in every}
    if others:
        return None
    return Coding(
        bits,
        math.gcd(*(each.group for each in every)),
        zero,
        scales.pop() if len(scales) == 1 else ScaleType.FLOAT32,
        any(each.has_minimums for each in every),
        rounded,
    )


@dataclass(frozen=True, slots=True)
class Codes:
    """Some rows of a matrix, and of these some columns: whole units."""

    coding: Coding
    codes: NDArray[np.uint8]  # [rows, columns]
    scales: NDArray[Any]  # [rows, groups] float16, float32 or int8
    minimums: NDArray[Any] | None = None  # likewise
    super_scales: NDArray[np.float16] | None = None  # [rows, columns / 256]
    super_minimums: NDArray[np.float16] | None = None  # likewise, but for nested ones

    @property
    def numbers(self) -> list[NDArray[Any]]:
        """All floats: if one is not finite, neither are weights."""
        every = (self.scales, self.minimums, self.super_scales, self.super_minimums)
        return [each for each in every if each is not None and each.dtype != np.int8]

    def decoded(self) -> Floats:
        """[rows, columns]."""
        shape = (*self.scales.shape, self.coding.group)
        codes = (self.codes.astype(np.int16) - np.int16(self.coding.zero)).astype(np.float32)
        weights = codes.reshape(shape)
        weights *= self._whole(self.scales, self.super_scales)[:, :, None]
        if self.minimums is not None:
            weights -= self._whole(self.minimums, self._supers_of_minimums)[:, :, None]
        return _rounded(weights, self.coding.rounded).reshape(self.codes.shape)

    def rows(self, of: slice | NDArray[np.int64]) -> Codes:
        """Return some rows, or all of them in another order."""

        def some(numbers: NDArray[Any] | None) -> NDArray[Any] | None:
            return None if numbers is None else numbers[of]

        return Codes(
            self.coding,
            self.codes[of],
            self.scales[of],
            some(self.minimums),
            some(self.super_scales),
            some(self.super_minimums),
        )

    def within(self, coding: Coding) -> Codes:
        """Return the same weights in a coding that holds them: it is `joined` of theirs."""
        own = self.coding
        if coding == own:
            return self
        scales, minimums = self.scales, self.minimums
        super_scales, super_minimums = self.super_scales, self.super_minimums
        if coding.has_minimums and minimums is None:
            minimums = np.zeros_like(scales)
            super_minimums = None if super_scales is None else np.zeros_like(super_scales)
        if coding.scale is not own.scale:
            scales = self._whole(scales, super_scales)
            if minimums is not None:
                minimums = self._whole(minimums, self._supers_of_minimums)
            super_scales = super_minimums = None
        each = own.group // coding.group
        return Codes(
            coding,
            self.codes + np.uint8(coding.zero - own.zero),
            np.repeat(scales, each, axis=1),
            None if minimums is None else np.repeat(minimums, each, axis=1),
            super_scales,
            super_minimums,
        )

    @property
    def _supers_of_minimums(self) -> NDArray[np.float16] | None:
        is_nested = self.coding.scale is ScaleType.NESTED
        return self.super_scales if is_nested else self.super_minimums

    def _whole(self, numbers: NDArray[Any], supers: NDArray[np.float16] | None) -> Floats:
        """Scales or minimums in float32: [rows, groups]."""
        wide = numbers.astype(np.float32)
        if supers is None:
            return wide
        shares = np.arange(numbers.shape[1]) * self.coding.group // SUPER_INPUTS
        return np.asarray(supers.astype(np.float32)[:, shares] * wide, np.float32)


def _rounded(weights: Floats, to: Rounded) -> Floats:
    if to is Rounded.FLOAT16:
        return weights.astype(np.float16).astype(np.float32)
    if to is Rounded.BFLOAT16:
        bits = weights.view(np.uint32)
        bits = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
        return (bits & np.uint32(0xFFFF0000)).view(np.float32)
    return weights
