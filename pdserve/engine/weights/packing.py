"""What the matrices of a checkpoint are stored as, and what they are packed as, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from pdserve.engine.plan.forms import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FP8,
    INT4,
    INT8,
    ActivationDtype,
    WeightForm,
)
from pdserve.engine.plan.matrix import Matrix
from pdserve.engine.plan.model import ModelPlan
from pdserve.model_files.stored_types import size_of

_SAME: Final = {BFLOAT16.name: {"BF16"}, FLOAT16.name: {"F16"}}
_ERRORS: Final = {  # of what is rounded, at most
    BFLOAT16.name: "off by up to 0.2 %",
    FLOAT16.name: "off by up to 0.05 %",
    INT8.name: "off by up to 0.4 % of a row's largest",
    FP8.name: "off by up to 6 %",
    INT4.name: "off by up to 5 % of the range of 32",
}


def packing(plan: ModelPlan, types: Mapping[str, str]) -> str:
    """Say, for each form: from what, how many matrices, bytes, and the error.

    Args:
        plan: of what is packed.
        types: name of a tensor |-> what it is stored as.
    """
    counts: Counter[tuple[str, WeightForm]] = Counter()
    sizes: Counter[tuple[str, WeightForm]] = Counter()
    errors: dict[tuple[str, WeightForm], str] = {}
    for matrix in _packed(plan):
        stored = {types[part.weight] for part in matrix.parts if part.weight in types}
        key = " + ".join(sorted(stored)), matrix.form
        counts[key] += 1
        sizes[key] += matrix.num_bytes
        errors[key] = _error(stored, matrix.form)
    return "; ".join(
        f"{stored} as {form.name} ({counts[stored, form]}, {size_of(size)}, {errors[stored, form]})"
        for (stored, form), size in sizes.most_common()
    )


def multiplied_as(plan: ModelPlan, activations: ActivationDtype) -> str:
    """Say what activations become in products: `8-bit integers`, or what they are.

    Args:
        plan: of what is packed.
        activations: their type.
    """
    forms = {matrix.form for matrix in plan.matrices}
    has_codes = any(form.dtype in ("int8", "uint8") for form in forms)
    if activations is ActivationDtype.FLOAT32 or not has_codes:
        return activations
    return "8-bit integers, 16-bit around outliers"


def _packed(plan: ModelPlan) -> Iterator[Matrix]:
    yield from plan.matrices
    if plan.table is not None and plan.table is not plan.lm_head:
        yield plan.table


def _error(stored: set[str], form: WeightForm) -> str:
    if form.keeps_stored or form is FLOAT32 or stored <= _SAME.get(form.name, set()):
        return "exact"
    return _ERRORS[form.name]
