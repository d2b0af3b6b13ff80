"""Whether an attention computes what it should, whatever imports."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pdserve.engine.attention.reference import ReferenceAttention
from pdserve.engine.cuda.catalog import AttentionNeeds
from pdserve.engine.cuda.probe import AttentionBroken, check_attention
from tests.kernels.cases import GPU_DTYPES

CPU = torch.device("cpu")
NEEDS = [AttentionNeeds(dtype, 32) for dtype in GPU_DTYPES]


class Wrong(ReferenceAttention):
    """Forgets the newest token."""

    name = "wrong"

    def attend(self, *arguments: Any, **fields: Any) -> Tensor:
        query, pool, layer, batch = arguments
        less = dataclasses.replace(batch, context_lens=batch.context_lens - 1)
        return super().attend(query, pool, layer, less, **fields)


@pytest.mark.parametrize("needs", NEEDS, ids=str)
@pytest.mark.usefixtures("interpreted")
def test_ours_works(needs: AttentionNeeds) -> None:
    from pdserve.engine.cuda.triton_attention import TritonAttention  # once they are interpreted

    check_attention(TritonAttention(), needs, CPU)


@pytest.mark.parametrize("needs", NEEDS, ids=str)
def test_what_computes_something_else_is_found(needs: AttentionNeeds) -> None:
    with pytest.raises(AttentionBroken, match="wrong is off by"):
        check_attention(Wrong(), needs, CPU)
