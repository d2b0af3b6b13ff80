"""How far off fewer bits are, in thousandths of a nat: data.

Means over the tokens of held-out answers of the demo model, of how much a log-probability changes.
docs/FAILURES.md has them, too, and `tests/unit/engine_model/weights/test_pairs.py` measures them.
Other models may be off by more, or by less.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pdserve.kv import KvDtype

# Of prefill nodes |-> of decode nodes.
OF_WEIGHTS: Final[Mapping[str, Mapping[str, float]]] = MappingProxyType(
    {
        "bfloat16": {"bfloat16": 0.0, "int8": 6.5, "fp8": 17.6, "int4": 36.3},
        "int8": {"bfloat16": 3.8, "int8": 7.4, "fp8": 18.9, "int4": 36.9},
        "fp8": {"bfloat16": 7.2, "int8": 9.6, "fp8": 18.5, "int4": 36.6},
        "int4": {"bfloat16": 23.5, "int8": 24.0, "fp8": 26.8, "int4": 44.7},
    }
)
OF_KV: Final[Mapping[KvDtype, float]] = MappingProxyType(
    {KvDtype.BFLOAT16: 0.0, KvDtype.INT8: 5.9, KvDtype.FP8: 19.0}
)
UNIT: Final = "thousandths of a nat, on average, of log-probabilities of the demo model's answers"


def off_by(prefill: str, decode: str, kv: KvDtype) -> float:
    """Return how far off forms are; both errors are added, as if they never cancelled."""
    return OF_WEIGHTS[prefill][decode] + OF_KV[kv]
