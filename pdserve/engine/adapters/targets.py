"""What adapters call the modules of a model, and which parts of its plan these are.

PEFT has the names of transformers' modules. Most are the tensors' names in checkpoints. Those that
are fused there have several parts of the plan; routers and experts of version 5 of transformers
have names of their own, and all experts of a layer are one parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pdserve.engine.adapters.adapter import LowRank
from pdserve.engine.plan.layer import LayerPlan
from pdserve.engine.plan.matrix import Matrix, TensorRows
from pdserve.engine.plan.model import ModelPlan


@dataclass(slots=True)
class Target:
    """A module that may be adapted."""

    num_in: int
    pieces: list[tuple[str, TensorRows, int]] = field(default_factory=list)  # part, where, rows
    is_router: bool = False

    @property
    def is_absorbed(self) -> bool:
        """Whether it makes keys of latent attention, and queries are multiplied by it instead."""
        return any(place.is_transposed for _, place, _ in self.pieces)

    @property
    def num_out(self) -> int:
        """Rows of its matrix."""
        return sum(count for _, _, count in self.pieces)

    def split(self, numbers: Tensor) -> dict[str, Tensor]:
        """Divide one number for each row among the parts of the plan."""
        return {name: numbers[_rows(place, count)] for name, place, count in self.pieces}

    def parts(self, whole: LowRank) -> dict[str, LowRank]:
        """Divide what is added to it among the parts of the plan."""
        found = {}
        for name, place, count in self.pieces:
            rows = _rows(place, count)
            if place.is_transposed:
                found[name] = LowRank(whole.b[rows].T.contiguous(), whole.a.T.contiguous())
                continue
            bias = None if whole.bias is None else whole.bias[rows]
            found[name] = LowRank(whole.a, whole.b[rows].contiguous(), bias)
        return found


@dataclass(frozen=True, slots=True)
class Targets:
    """Of a model, by the names of PEFT without its prefix."""

    modules: dict[str, Target]
    # Of a layer: the plan's matrices of each expert, and their modules in the experts' order.
    experts: dict[str, dict[str, list[Target]]]

    @classmethod
    def of(cls, plan: ModelPlan) -> Targets:
        """List those of a whole model."""
        modules: dict[str, Target] = {}
        experts: dict[str, dict[str, list[Target]]] = {}
        for index, layer in enumerate(plan.layers):
            for matrix in layer.all_matrices:
                _add(modules, matrix)
            if layer.mlp.choice is not None:
                block = f"model.layers.{index}.mlp"
                experts[f"{block}.experts"] = _fused(layer, layer.mlp.choice.takes_turns)
                own = layer.mlp.matrices["router"].parts[0].name
                modules[own].is_router = True
                modules[f"{block}.gate"] = modules[own]
        return cls(modules, experts)


def _add(modules: dict[str, Target], matrix: Matrix) -> None:
    for part in matrix.parts:
        place = part.within or TensorRows(part.name)
        num_in, num_out = matrix.num_in, len(part.rows)
        if place.is_transposed:
            num_in, num_out = num_out, num_in
        target = modules.setdefault(place.name, Target(num_in))
        target.pieces.append((part.name, place, num_out))


def _fused(layer: LayerPlan, takes_turns: bool) -> dict[str, list[Target]]:
    experts = layer.mlp.experts
    return {name: [_joined(expert[name], takes_turns) for expert in experts] for name in experts[0]}


def _joined(matrix: Matrix, takes_turns: bool) -> Target:
    """One module of all parts: one after the other, or a row of each in turn."""
    target, first, count = Target(matrix.num_in), 0, len(matrix.parts)
    for number, part in enumerate(matrix.parts):
        place = TensorRows(matrix.name, first)
        if takes_turns:
            place = TensorRows(matrix.name, 0, (number,), head_rows=count)
        target.pieces.append((part.name, place, len(part.rows)))
        first += len(part.rows)
    return target


def _rows(place: TensorRows, count: int) -> Tensor | slice:
    """Which rows of a module are those of a part, in its order."""
    if not place.head_order:
        return slice(place.first_row, place.first_row + count)
    size, there = place.strides
    rows, order = torch.arange(count), torch.tensor(place.head_order)
    return place.first_row + rows // size * there + order[rows % size]


def of_experts(targets: Iterable[Target], a: Tensor, b: Tensor) -> dict[str, LowRank]:
    """Divide what is added to all experts of a layer: A is [experts * rank, in_features].

    The rows of an expert's A follow each other; the columns of its B, [out_features, rank *
    experts], are as far apart as there are experts.
    """
    every = list(targets)
    rank = len(a) // len(every)
    found: dict[str, LowRank] = {}
    for number, target in enumerate(every):
        own_a = a[number * rank : (number + 1) * rank]
        found |= target.parts(LowRank(own_a, b[:, number :: len(every)].contiguous()))
    return found
