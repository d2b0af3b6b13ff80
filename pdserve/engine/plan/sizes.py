"""What a plan's weights take: memory, bytes that a step reads, and products that it computes."""

from __future__ import annotations

from pdserve.engine.plan.forms import ActivationDtype
from pdserve.engine.plan.layer import LayerPlan
from pdserve.engine.plan.matrix import Matrices
from pdserve.engine.plan.model import ModelPlan


def weight_bytes(plan: ModelPlan, dtype: ActivationDtype) -> int:
    """Return the size of a rank's weights in torch: what is in no layer's matrix is of `dtype`."""
    matrices = [matrix for layer in plan.layers for matrix in layer.all_matrices]
    norms = sum(
        norm.size
        * (1 if norm.is_of_all_heads else norm.num_heads or 1)
        * (ActivationDtype.FLOAT32.itemsize if norm.is_wide else dtype.itemsize)
        for norm in plan.norms
    )
    others = sum(matrix.num_out for matrix in matrices if matrix.has_bias)
    ends = [] if plan.embedding is None else [plan.embedding]
    if plan.lm_head is not None and plan.lm_head.form.is_coded:
        matrices.append(plan.lm_head)
    elif plan.lm_head is not None:
        ends += plan.lm_head.parts
    rows = {part.name: len(part.rows) for part in ends}  # once, if they are tied
    others += sum(rows.values()) * plan.config.hidden_size
    return sum(matrix.num_bytes for matrix in matrices) + norms + others * dtype.itemsize


def packed_bytes(plan: ModelPlan, dtype: ActivationDtype) -> int:
    """Return the size of a rank's weights as packed on a CPU; `dtype`: of the embedding."""
    numbers = sum(norm.size for norm in plan.norms)
    numbers += sum(matrix.num_out for matrix in plan.matrices if matrix.has_bias)
    if plan.table is not None:
        embedding = 0 if plan.table is plan.lm_head else plan.table.num_bytes
    else:
        num_rows = 0 if plan.embedding is None else len(plan.embedding.rows)
        embedding = num_rows * plan.config.hidden_size * dtype.itemsize
    return sum(matrix.num_bytes for matrix in plan.matrices) + embedding + numbers * 4


def bytes_read(layer: LayerPlan, num_rows: int) -> int:
    """Return the bytes of a layer's matrices that a step of so many rows reads.

    Of experts, those of as many as the rows choose on average, if they choose evenly.
    """
    always = [layer.matrices, *layer.heads]
    num_bytes = sum(matrix.num_bytes for each in always for matrix in each.values())
    if (choice := layer.mlp.choice) is None:
        return num_bytes
    missed = (1 - choice.num_chosen / choice.num_experts) ** num_rows
    expert = sum(matrix.num_bytes for matrix in layer.mlp.experts[0].values())
    return num_bytes + round(choice.num_experts * (1 - missed) * expert)


def kv_weights(layer: LayerPlan) -> int:
    """Return how many weights a row is multiplied by for its keys and values alone."""
    if "latent" in layer.mixer:
        return layer.mixer["latent"].num_weights
    if not layer.has_kv:
        return layer.mixer["recurrent_in"].num_weights
    _, *keys_and_values = layer.mixer["qkv"].parts[:3]
    return sum(len(part.rows) for part in keys_and_values) * layer.mixer["qkv"].num_in


def row_weights(layer: LayerPlan) -> int:
    """Return how many weights a row is multiplied by: of experts, of those that it chooses."""
    count = _num_weights(layer.matrices) + sum(map(_num_weights, layer.heads))
    if layer.mlp.choice is not None:
        count += layer.mlp.choice.num_chosen * _num_weights(layer.mlp.experts[0])
    return count


def _num_weights(matrices: Matrices) -> int:
    return sum(matrix.num_weights for matrix in matrices.values())
