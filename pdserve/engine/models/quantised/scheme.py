"""How the matrices of a quantised checkpoint are stored, whatever library wrote it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from pdserve.model_files.stored_types import names_in_files
from pdserve.shared.errors import ModelError


class Layout(StrEnum):
    """Which tensors stand for a matrix: one reader each."""

    AWQ = "AWQ"
    GPTQ = "GPTQ"
    PACKED = "packed integers"
    SCALED = "numbers with scales"
    FP4 = "FP4"
    BITSANDBYTES_4 = "bitsandbytes, 4 bits"
    BITSANDBYTES_8 = "bitsandbytes, 8 bits"
    TORCHAO = "torchao"


@dataclass(frozen=True, slots=True)
class Scheme:
    """How some matrices are stored."""

    layout: Layout
    bits: int
    group: tuple[int, int] = (1, 0)  # outputs and inputs that share a scale; 0: all
    is_symmetric: bool = True
    zeros_less_one: bool = False  # zero points are stored as one less
    is_float: bool = False  # codes are floats
    rounds: bool = False  # weights have the type of scales

    def __str__(self) -> str:
        """For people, as in `4 bits by 128`, or `8-bit floats`."""
        rows, columns = self.group
        by = f" by {columns}" if rows == 1 and columns else ""
        by = f" by {rows} x {columns}" if rows > 1 else by
        return f"{self.bits}-bit floats{by}" if self.is_float else f"{self.bits} bits{by}"


Matches = Callable[[str], bool]  # a module's name


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How each module of a checkpoint is stored, if it is quantised: the files tell which are."""

    method: str  # of the library
    schemes: tuple[tuple[Matches, Scheme], ...]  # the first that matches holds
    where: str  # the file that says so
    dtype: str = "float32"  # of the model's other weights

    def scheme_of(self, module: str) -> Scheme:
        """Raises ModelError: it is stored quantised, but no scheme is for it."""
        names = names_in_files(module)
        for matches, scheme in self.schemes:
            if any(map(matches, names)):
                return scheme
        raise ModelError(f"{self.where}: {module} is quantised, but nothing there says how")

    def kind_of(self, module: str) -> str:
        """How it is stored, for people: `awq, 4 bits by 128`. Raises as scheme_of."""
        return f"{self.method}, {self.scheme_of(module)}"

    def __str__(self) -> str:
        """For people, as in `awq: 4 bits by 128`."""
        kinds = dict.fromkeys(str(scheme) for _, scheme in self.schemes)
        return f"{self.method}: {', '.join(kinds)}"


def every(module: str) -> bool:
    """Matches all modules."""
    return True


def matching(pattern: str, where: str) -> Matches:
    """Match by a regular expression of a config. Raises ModelError: it is none."""
    try:
        match = re.compile(pattern).match
    except (re.error, RecursionError) as error:
        raise ModelError(f"{where}: {pattern!r} is no regular expression: {error}") from error
    return lambda module: match(module) is not None
