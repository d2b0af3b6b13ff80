"""The forms in which matrices are stored: data, a row of FORMS each.

What multiplies by a form is looked up by form and device: `csrc/linear/form.cpp` on CPUs,
`cuda/quantised` on GPUs, and `Linear` in torch, which takes any form with a scale for each output.

A form with a coding holds codes: a quantised checkpoint's own, or those that weights are rounded to
(INT4).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from pdserve.model_files.coding import Coding, ScaleType


class ActivationDtype(StrEnum):
    """Element type of what a step computes, and of weights that are no matrices."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self is ActivationDtype.FLOAT32 else 2


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How the weights of a matrix are stored, and their scales."""

    name: str  # as settings, packed files and kernels have it
    dtype: str  # of a weight's code
    bits: int  # of one
    devices: frozenset[str]  # types of devices whose nodes serve it
    group: tuple[int, int] = (0, 0)  # rows and columns that share a scale; of 0: all
    scale_bytes: int = 0  # 0: codes are the weights themselves
    coding: Coding | None = None  # of what is kept as codes

    @property
    def is_quantised(self) -> bool:
        """Whether weights are rounded to it from what the checkpoint has."""
        return self.scale_bytes > 0

    @property
    def has_row_scales(self) -> bool:
        """Whether a matrix has scales of its rows, apart from what a coding has."""
        return self.is_quantised and self.coding is None

    @property
    def keeps_stored(self) -> bool:
        """Whether it holds a checkpoint's own codes."""
        return self.coding is not None and not self.is_quantised

    @property
    def is_coded(self) -> bool:
        """Whether a matrix holds codes, of either kind."""
        return self.is_quantised or self.coding is not None

    @property
    def quantization(self) -> str:
        """The setting that asks for it."""
        return self.name if self.is_quantised else "none"

    def num_bytes(self, num_out: int, num_in: int) -> int:
        """Size of a matrix, with its scales, and without padding."""
        if self.coding is not None:
            return self.coding.num_bytes(num_out, num_in)
        rows, columns = self.group
        num_groups = -(-num_out // (rows or num_out)) * -(-num_in // (columns or num_in))
        return -(-num_out * num_in * self.bits // 8) + num_groups * self.scale_bytes

    def can_cut(self, row: int, column: int) -> bool:
        """Whether a rank may begin at this row and column: none shares a scale with another.

        Rows or columns that all share one are cut anywhere: each rank has a scale for its own.
        """
        rows, columns = self.group
        return row % (rows or 1) == 0 and column % (columns or 1) == 0


_ALL: Final = frozenset({"cpu", "cuda"})

FLOAT32: Final = WeightForm("float32", "float32", 32, _ALL)
BFLOAT16: Final = WeightForm("bfloat16", "bfloat16", 16, _ALL)
FLOAT16: Final = WeightForm("float16", "float16", 16, frozenset({"cuda"}))
INT8: Final = WeightForm("int8", "int8", 8, _ALL, group=(1, 0), scale_bytes=4)
FP8: Final = WeightForm("fp8", "float8_e4m3fn", 8, _ALL, group=(1, 0), scale_bytes=4)
INT4: Final = WeightForm(
    "int4",
    "uint8",
    4,
    _ALL,
    group=(1, 32),
    scale_bytes=4,
    coding=Coding(4, 32, scale=ScaleType.NESTED, has_minimums=True),
)

FORMS: Final = {form.name: form for form in (FLOAT32, BFLOAT16, FLOAT16, INT8, FP8, INT4)}


def fitting_form(form: WeightForm, num_in: int, *, is_head: bool = False) -> WeightForm:
    """Return what a matrix has where the model has `form`.

    Heads are never of 4 bits, since nothing after them averages their errors; nor is what is not
    whole groups.
    """
    return INT8 if form is INT4 and (is_head or num_in % form.group[1]) else form


def coded_form(coding: Coding) -> WeightForm:
    """Return the form that holds codes as they are."""
    group = (1, coding.unit)
    return WeightForm(str(coding), "uint8", coding.bits, _ALL, group, coding=coding)


def form_of(quantization: str, activations: ActivationDtype) -> WeightForm:
    """The form that the setting asks for: by default, weights have the type of activations."""
    return FORMS[activations if quantization == "none" else quantization]
