"""A GPU gets the first attention that computes what it should, whatever imports."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pdserve.engine.attention.reference import ReferenceAttention
from pdserve.engine.cuda import load
from pdserve.engine.cuda.catalog import KINDS, AttentionKind, AttentionNeeds
from pdserve.engine.cuda.load import best_attention
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


class Uncompiled(ReferenceAttention):
    """Imports, and then cannot compile."""

    name = "uncompiled"

    def attend(self, *arguments: Any, **fields: Any) -> Tensor:
        raise OSError("nvcc: not found")


@pytest.mark.parametrize("needs", NEEDS, ids=str)
@pytest.mark.usefixtures("interpreted")
def test_ours_works(needs: AttentionNeeds) -> None:
    from pdserve.engine.cuda.triton_attention import TritonAttention  # once they are interpreted

    check_attention(TritonAttention(), needs, CPU)


@pytest.mark.parametrize("needs", NEEDS, ids=str)
def test_what_computes_something_else_is_found(needs: AttentionNeeds) -> None:
    with pytest.raises(AttentionBroken, match="wrong is off by"):
        check_attention(Wrong(), needs, CPU)


def kind(backend: ReferenceAttention) -> AttentionKind:
    return AttentionKind(backend.name, lambda: None, lambda needs: None, lambda device: backend)


def test_the_next_one_is_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(load, "KINDS", (kind(Uncompiled()), kind(Wrong()), KINDS[-1]))
    with caplog.at_level(logging.ERROR):
        assert best_attention(NEEDS[0], CPU).name == "reference"
    assert [record.args for record in caplog.records] == [("uncompiled",), ("wrong",)]
    assert "nvcc: not found" in caplog.text
