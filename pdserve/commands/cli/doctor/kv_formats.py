"""From which context on KV in 8 bits pays on a CPU, for models of two sizes."""

from __future__ import annotations

from typing import Final

from pdserve.commands.bench.checkpoints.model_config import model_named
from pdserve.commands.cli.doctor.component import Availability, Component
from pdserve.engine.plan.forms import ActivationDtype
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.plan.sizes import weight_bytes
from pdserve.kv import KvDtype
from pdserve.kv.savings import worthwhile_context

_SHAPES: Final = ("160m", "8b")
_BATCH: Final = 16


def kv_format_components() -> list[Component]:
    """What to declare for which context: nothing switches by itself."""
    told = ", ".join(f"{_context(name)} tokens ({name})" for name in _SHAPES)
    return [
        Component(
            topic="native kernels",
            name="formats of KV",
            verdict=Availability.OK,
            detail=f"with {_BATCH} streams --kv-dtype int8 pays from contexts of {told}; see "
            "pdserve kv --model MODEL --context N",
        )
    ]


def _context(name: str) -> int:
    model = model_named(name)
    weights = weight_bytes(ModelPlan.of(model), ActivationDtype.BFLOAT16)
    return worthwhile_context(model.kv_layout(1, KvDtype.BFLOAT16), weights, _BATCH)
