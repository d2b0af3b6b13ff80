"""The shape of a planned step, which is what its time depends on."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.engine.request import Scheduled
from pdserve.perf_model import StepRow, StepShape


def shape_of(rows: Sequence[Scheduled]) -> StepShape:
    """Of a plan, while its requests are as they are before the step."""
    return StepShape.of(
        StepRow(
            row.num_tokens, row.request.num_computed_tokens, row.request.is_decoding, row.samples
        )
        for row in rows
    )
