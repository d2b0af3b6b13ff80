"""DoRA: rows of the merged weights have lengths of their own.

    m (W + B A) / |W + B A|  =  f W + (f B) A,  with f = m / |W + B A| of each row

So it is a low-rank matrix like others, beside factors of what the model's own matrix gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from pdserve.engine.adapters.adapter import LowRank
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.weights.opening import open_tensors
from pdserve.model_files.checkpoint import Checkpoint
from pdserve.shared.errors import AdapterRefused


def normalised(
    parts: Mapping[str, LowRank],
    lengths: Mapping[str, Tensor],
    checkpoint: Checkpoint,
    plan: ModelPlan,
) -> Iterator[tuple[str, LowRank]]:
    """Yield parts whose merged rows have these lengths. Reads the matrices that they are added to.

    Args:
        parts: by Part.name.
        lengths: [out_features] of each.
        checkpoint: of the model.
        plan: of the whole model.

    Raises:
        AdapterRefused: a merged row is zero, and has no direction.
        ModelError: the checkpoint cannot be read.
    """
    weights = open_tensors(
        checkpoint, plan.expected(), ignored=plan.ignored(), within=plan.within()
    )
    for name, part in parts.items():
        merged = weights[f"{name}.weight"][:].float().addmm(part.b, part.a)
        factors = lengths[name].float() / merged.norm(dim=1)
        if not factors.isfinite().all():
            raise AdapterRefused(f"{name} has a merged row of zeros, to which DoRA gives no length")
        yield name, replace(part, b=part.b * factors[:, None], factors=factors)
