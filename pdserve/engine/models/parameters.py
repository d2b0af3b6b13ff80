"""A decoder's weights in torch: memory for all that a plan lists, and whose tensors belong there.

The checkpoint's tensors are loaded directly into their rows. The experts of a layer are one stack
for each purpose, as are the heads of latent attention. The output matrix, which may be the
embedding, is stored as that is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdserve.engine.experts import Experts, SharedExpert
from pdserve.engine.layers import Linear, Mlp, empty_linear
from pdserve.engine.plan.layer import LayerPlan, MlpPlan
from pdserve.engine.plan.matrix import Matrices, Matrix, Part
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.plan.norm import Norm
from pdserve.shared.errors import ModelError


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, by the names of its plan."""

    norms: dict[str, Tensor]  # of rows of the residual stream or for it, or of latent vectors
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim]: one row per head
    mixer: dict[str, Linear]
    mlp: Mlp | Experts
    heads: dict[str, Linear]  # of latent attention: stacks of those of its heads; {}: it is none

    @property
    def linears(self) -> list[Linear]:
        """All matrices but stacks."""
        mlp = self.mlp
        if isinstance(mlp, Mlp):
            return [*self.mixer.values(), *mlp.linears.values()]
        shared = [] if mlp.shared is None else [*mlp.shared.mlp.linears.values()]
        return [*self.mixer.values(), *shared]


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where one tensor of the checkpoint belongs."""

    destination: Tensor  # the part of the weights that it is copied or broadcast into
    part: tuple[slice, ...] = ()  # of the tensor, that this rank has; (): all of it
    offset: float = 0.0  # to be added to the tensor
    quantised: Linear | None = None  # that makes codes of it
    first_row: int = 0  # there
    twin: TensorSlot | None = None  # where it belongs besides: to the output matrix

    @property
    def places(self) -> list[TensorSlot]:
        """This one, and where it belongs besides."""
        return [self] if self.twin is None else [self, self.twin]

    @property
    def checked(self) -> Tensor:
        """What is finite if and only if the tensor was."""
        if self.quantised is None:
            return self.destination
        rows = self.part[0]
        return self.quantised.checked(
            slice(self.first_row, self.first_row + rows.stop - rows.start)
        )


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """One rank's weights of a decoder, on one device."""

    embedding: Tensor  # [vocab_size, hidden_size]; [0, hidden_size] if not of the first stage
    layers: list[LayerWeights]  # of the stage
    final_norm: Tensor  # [hidden_size]; [0] if not of the last stage
    lm_head: Linear  # as embedding, of the last stage; if that is the first, too, itself when tied
    slots: dict[str, TensorSlot]  # of the tensors in the checkpoint; together they cover all

    def expect_norms(self, *known: str) -> None:
        """Raises ModelError: a decoder that knows these norms would leave others out."""
        if foreign := {name for layer in self.layers for name in layer.norms} - {*known}:
            raise ModelError(
                f"layers have {', '.join(sorted(foreign))}, which is not computed here"
            )


EmptyLinear = Callable[..., Linear]  # as `empty_linear`


def allocate_weights(
    plan: ModelPlan, dtype: torch.dtype, device: torch.device, empty: EmptyLinear = empty_linear
) -> DecoderWeights:
    """Allocate uninitialised memory for one rank's weights.

    Args:
        plan: of the rank.
        dtype: of what is no matrix.
        device: where they will be.
        empty: allocates matrices.
    """
    return _Allocation(plan, dtype, device, empty).weights()


class _Allocation:
    def __init__(
        self, plan: ModelPlan, dtype: torch.dtype, device: torch.device, empty: EmptyLinear
    ) -> None:
        self._empty_linear = empty
        self._plan = plan
        self._dtype = dtype
        self._device = device
        self._slots: dict[str, TensorSlot] = {}

    def weights(self) -> DecoderWeights:
        plan = self._plan
        embedding = self._vocabulary(plan.embedding)
        layers = [self._layer(layer) for layer in plan.layers]
        norm = plan.final_norm
        final_norm = self._empty(0) if norm is None else self._norm(norm, norm.size)
        if norm is not None:
            self._slots[norm.tensor] = TensorSlot(final_norm, offset=norm.offset)
        return DecoderWeights(embedding, layers, final_norm, self._head(embedding), self._slots)

    def _head(self, embedding: Tensor) -> Linear:
        """Return the output matrix, which is stored as the embedding, unless its kind is coded."""
        matrix = self._plan.lm_head
        if matrix is None:
            return Linear(self._vocabulary(None), None)
        (output,) = matrix.parts
        if self._empty_linear is not empty_linear and matrix.form.is_coded:
            tied = self._slots.get(output.weight)  # the embedding's
            head = self._linear(matrix)
            if tied is not None:
                self._slots[output.weight] = replace(tied, twin=self._slots[output.weight])
            return head
        is_shared = output == self._plan.embedding
        return Linear(embedding if is_shared else self._vocabulary(output), None)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _norm(self, norm: Norm, *shape: int) -> Tensor:
        dtype = torch.float32 if norm.is_wide else self._dtype
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _vocabulary(self, part: Part | None) -> Tensor:
        rows = self._empty(0 if part is None else len(part.rows), self._plan.config.hidden_size)
        if part is not None:
            self._slots[part.weight] = TensorSlot(rows, (part.cut,))
        return rows

    def _layer(self, layer: LayerPlan) -> LayerWeights:
        # The checkpoint has one vector for all query heads and one for all key heads. They are
        # broadcast to a row per head, so that one product normalises both.
        of_heads = [norm for norm in layer.norms.values() if norm.num_heads]
        qk_norm = None
        if of_heads:
            num_heads = sum(norm.num_heads for norm in of_heads)
            qk_norm = self._norm(of_heads[0], num_heads, self._plan.config.head_dim)
        norms, head = {}, 0
        for name, norm in layer.norms.items():
            if qk_norm is not None and norm.num_heads:
                place = qk_norm[head : head + norm.num_heads]
                place = place.view(-1) if norm.is_of_all_heads else place
                head += norm.num_heads
            else:
                place = norms[name] = self._norm(norm, *norm.shape)
            self._slots[norm.tensor] = TensorSlot(place, norm.cut, offset=norm.offset)
        mixer, mlp = self._linears(layer.mixer), self._linears(layer.mlp.matrices)
        heads = self._stacks(layer.heads)
        if layer.mlp.choice is None:
            return LayerWeights(norms, qk_norm, mixer, Mlp(**mlp), heads)
        return LayerWeights(norms, qk_norm, mixer, self._experts(layer.mlp, mlp), heads)

    def _experts(self, plan: MlpPlan, matrices: dict[str, Linear]) -> Experts:
        assert plan.choice is not None, "as asked"
        shared, bias = None, None
        if plan.choice.shared_size:
            one = Mlp(matrices["shared_gate_up"], matrices["shared_down"])
            weighs = plan.choice.weighs_shared
            shared = SharedExpert(one, matrices["shared_weight"] if weighs else None)
        if plan.score_bias is not None:
            bias = self._norm(plan.score_bias, plan.score_bias.size)
            self._slots[plan.score_bias.tensor] = TensorSlot(bias)
        router, stacks = matrices["router"], self._stacks(plan.experts)
        return Experts(plan.choice, router, **stacks, shared=shared, score_bias=bias)

    def _linears(self, matrices: Matrices) -> dict[str, Linear]:
        return {name: self._linear(matrix) for name, matrix in matrices.items()}

    def _linear(self, matrix: Matrix) -> Linear:
        made = self._empty_linear(matrix, self._dtype, self._device)
        self._place(matrix, made)
        return made

    def _stacks(self, parts: tuple[Matrices, ...]) -> dict[str, Linear]:
        return {name: self._stack(name, parts) for name in parts[0]} if parts else {}

    def _stack(self, name: str, experts: tuple[Matrices, ...]) -> Linear:
        made = self._empty_linear(experts[0][name], self._dtype, self._device, len(experts))
        for number, expert in enumerate(experts):
            self._place(expert[name], made[number])
        return made

    def _place(self, matrix: Matrix, linear: Linear) -> None:
        for part, rows, cut in matrix.placed():
            fills = None if linear.scales is None else linear
            self._slots[part.weight] = TensorSlot(
                linear.stored(rows), cut, quantised=fills, first_row=rows.start
            )
            if linear.bias is not None:
                self._slots[part.bias] = TensorSlot(linear.bias[rows], cut[:1])
