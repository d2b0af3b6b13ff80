"""Whether an attention computes what it should, whatever imports."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pdserve.engine.attention import AttentionBatch, LayerKv
from pdserve.engine.attention.reference import ReferenceAttention
from pdserve.engine.cuda.attention.catalog import AttentionNeeds
from pdserve.engine.cuda.attention.probe import (
    AttentionBroken,
    AttentionTrial,
    check_attention,
    check_decodes,
)
from tests.fakes.graphs import Recorded
from tests.kernels.cases import GPU_DTYPES
from tests.matrix import matrix

CPU = torch.device("cpu")
WINDOWED = [AttentionNeeds(dtype, 32, windows=(None, 4096)) for dtype in GPU_DTYPES]
NEEDS = [
    *WINDOWED,
    AttentionNeeds(torch.float32, 32, has_sinks=True),
    AttentionNeeds(torch.float32, 48, 4, 1, value_dim=36),
]


class Wrong(ReferenceAttention):
    """Forgets the newest token."""

    name = "wrong"

    def attend(self, query: Tensor, kv: LayerKv, batch: AttentionBatch, *place: Any) -> Tensor:
        less = dataclasses.replace(batch, context_lens=batch.context_lens - 1)
        return super().attend(query, kv, less, *place)


class Near(ReferenceAttention):
    """Takes windows for one token more, or less, than they are."""

    name = "near"

    def __init__(self, excess: int) -> None:
        self._excess = excess

    def attend(self, query: Tensor, kv: LayerKv, batch: AttentionBatch, *place: Any) -> Tensor:
        if kv.sliding_window is not None:
            kv = dataclasses.replace(kv, sliding_window=kv.sliding_window + self._excess)
        return super().attend(query, kv, batch, *place)

    def attend_decode(self, query: Tensor, kv: LayerKv, batch: AttentionBatch) -> Tensor:
        return self.attend(query, kv, batch)


class Elsewhere(ReferenceAttention):
    """Does not put its result where it is told."""

    name = "elsewhere"

    def attend(self, query: Tensor, kv: LayerKv, batch: AttentionBatch, *_: Any) -> Tensor:
        return super().attend(query, kv, batch)


class WrongDecodes(ReferenceAttention):
    """Takes decode rows for those of another layer."""

    name = "wrong_decodes"

    def attend_decode(self, query: Tensor, kv: LayerKv, batch: AttentionBatch) -> Tensor:
        return self.attend(query, dataclasses.replace(kv, layer=0), batch)


@pytest.mark.long
@pytest.mark.parametrize("needs", matrix(NEEDS, 1), ids=str)
@pytest.mark.usefixtures("interpreted")
def test_ours_works(needs: AttentionNeeds) -> None:
    from pdserve.engine.cuda.attention.triton_attention import (
        TritonAttention,  # once they are interpreted
    )

    check_attention(TritonAttention(), needs, CPU)
    check_decodes(TritonAttention(), needs, CPU, Recorded())


@pytest.mark.parametrize("needs", NEEDS, ids=str)
def test_what_computes_something_else_is_found(needs: AttentionNeeds) -> None:
    with pytest.raises(AttentionBroken, match="wrong is off by"):
        check_attention(Wrong(), needs, CPU)
    check_attention(WrongDecodes(), needs, CPU)
    with pytest.raises(AttentionBroken, match="wrong_decodes in a graph is off by"):
        check_decodes(WrongDecodes(), needs, CPU, Recorded())


@pytest.mark.parametrize("needs", NEEDS, ids=str)
def test_a_result_that_is_not_where_it_should_be_is_found(needs: AttentionNeeds) -> None:
    with pytest.raises(AttentionBroken, match="elsewhere, told where its result goes, is off by"):
        check_attention(Elsewhere(), needs, CPU)


@pytest.mark.parametrize("excess", [-1, 1])
@pytest.mark.parametrize("needs", WINDOWED, ids=str)
def test_a_window_that_is_off_by_one_is_found(needs: AttentionNeeds, excess: int) -> None:
    near = Near(excess)
    with pytest.raises(AttentionBroken, match=r"near is off by .* with a window"):
        check_attention(near, needs, CPU)
    with pytest.raises(AttentionBroken, match=r"near in a graph is off by .* with a window"):
        check_decodes(near, needs, CPU, Recorded())
    without = dataclasses.replace(needs, windows=(None, None))
    check_attention(near, without, CPU)
    check_decodes(near, without, CPU, Recorded())


def test_a_step_has_a_batch_of_its_own_for_all_layers() -> None:
    """So one that plans for a batch does so once in a step, as when a model runs."""
    calls: list[tuple[int, int | None, object]] = []

    def attend(query: Tensor, kv: LayerKv, batch: AttentionBatch) -> Tensor:
        calls.append((kv.layer, kv.sliding_window, batch))
        return query

    trial = AttentionTrial(((2, 5),), NEEDS[0], CPU, num_layers=2)
    for _ in range(2):
        trial.step(attend, (None, 4, None))
    assert [call[:2] for call in calls] == [(0, None), (1, 4), (0, None)] * 2
    first, second = calls[0][2], calls[3][2]
    assert first is not second
    assert [call[2] is first for call in calls] == [True] * 3 + [False] * 3
    assert all(call[2] is second for call in calls[3:])
