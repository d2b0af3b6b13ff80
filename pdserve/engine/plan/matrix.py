"""A matrix of a model: which tensors of the checkpoint it is made of, and in which form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from pdserve.engine.plan.forms import WeightForm, coded_form, fitting_form
from pdserve.model_files.coding import Coding, joined


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Where files have a tensor of the model, with all its rows, in a tensor of another form."""

    name: str  # of that tensor, as Part.name
    first_row: int = 0  # there
    # Of a head's rows, in the model's order: which of the file's. (): they are in one order.
    head_order: tuple[int, ...] = ()
    is_transposed: bool = False  # its rows there are the columns of the model's
    head_rows: int = 0  # that a head has there; 0: as many as in the model

    @property
    def strides(self) -> tuple[int, int]:
        """Rows of a head in the model, and there."""
        size = len(self.head_order) or 1
        return size, self.head_rows or size


@dataclass(frozen=True, slots=True)
class Part:
    """The rows that a rank has of a tensor in the checkpoint."""

    name: str  # of the tensor, without ".weight" and ".bias"
    rows: range
    within: TensorRows | None = None  # where files have the tensor; None: by its own name

    @property
    def weight(self) -> str:
        """The tensor's name."""
        return f"{self.name}.weight"

    @property
    def bias(self) -> str:
        """The name of its bias, [rows]."""
        return f"{self.name}.bias"

    @property
    def cut(self) -> slice:
        """The rows, to index the tensor with."""
        return slice(self.rows.start, self.rows.stop)


@dataclass(frozen=True, slots=True)
class Matrix:
    """x · weightᵀ + bias, as one rank has it: the rows of its parts, one after the other."""

    name: str  # of the packed arrays
    parts: tuple[Part, ...]
    columns: range  # of each part
    form: WeightForm
    is_gated: bool = False  # two parts, gate and up, of which silu(gate) * up is made
    has_bias: bool = False  # which is added here, not by another rank

    @property
    def num_out(self) -> int:
        """Rows of all parts."""
        return sum(len(part.rows) for part in self.parts)

    @property
    def num_in(self) -> int:
        """Columns of each."""
        return len(self.columns)

    @property
    def num_weights(self) -> int:
        """Weights, without biases."""
        return self.num_out * self.num_in

    @property
    def num_bytes(self) -> int:
        """Their size, with scales."""
        return self.form.num_bytes(self.num_out, self.num_in)

    def coded(self, codings: Mapping[str, Coding]) -> Matrix:
        """Return it in a form that holds its tensors' codes, if there is one.

        Otherwise, or if a rank's columns begin or end within a scale's, it is returned as it is: as
        are transposed ones, whose units are of the other dimension.
        """
        if any(part.within is not None and part.within.is_transposed for part in self.parts):
            return self
        own = [codings[part.weight] for part in self.parts if part.weight in codings]
        coding = joined(own) if len(own) == len(self.parts) else None
        if coding is None or any(
            self.columns.start % each.unit or self.columns.stop % each.unit
            for each in (coding, *own)
        ):
            return self
        return replace(self, form=coded_form(coding))

    def placed(self) -> Iterator[tuple[Part, slice, tuple[slice, slice]]]:
        """Yield each part, its rows of the matrix, and what it is of its tensor."""
        first, columns = 0, slice(self.columns.start, self.columns.stop)
        for part in self.parts:
            yield part, slice(first, first + len(part.rows)), (part.cut, columns)
            first += len(part.rows)


Matrices = dict[str, Matrix]  # by the names that decoders know


def mixer_out(
    layer: str,
    tensor: str,
    rows: range,
    values: range,
    form: WeightForm,
    *,
    has_bias: bool = False,
) -> Matrices:
    """Return the matrix that all mixers end with: it takes the values of a rank's heads."""
    part, fitting = Part(f"{layer}{tensor}", rows), fitting_form(form, len(values))
    matrix = Matrix(f"{layer}attention_out", (part,), values, fitting, has_bias=has_bias)
    return {"attention_out": matrix}
