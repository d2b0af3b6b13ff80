"""Weights arrive whole, whatever the GPU copies late, and whoever aborts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdserve.engine.cuda.copies.weight_upload import UploadSizes, WeightCopy, upload_weights
from tests.fakes.late_copies import LateCopies, LateCopy

SIZES = UploadSizes(num_threads=3, num_buffers=4, piece_bytes=1000)


def some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def make_copies() -> list[WeightCopy]:
    """As slots of a checkpoint have them: rows, columns, other dtypes, broadcasts."""

    def nowhere(*shape: int) -> Tensor:
        return torch.full(shape, 7.0, dtype=torch.bfloat16)

    fused = nowhere(90, 40)  # rows of it are other tensors' destinations
    return [
        WeightCopy(some(60, 40), fused[:60]),
        WeightCopy(some(30, 40), fused[60:]),
        WeightCopy(some(70, 64)[:, 16:48], nowhere(70, 32)),
        WeightCopy(some(33, 21, dtype=torch.float32), nowhere(33, 21)),
        WeightCopy(some(16), nowhere(5, 16)),
        WeightCopy(some(2000), nowhere(2000)),
        WeightCopy(some(2, 900), nowhere(2, 900)),  # a row is larger than a piece
    ]


def arrived(copy: WeightCopy) -> bool:
    expected = copy.source.expand(copy.destination.shape).to(copy.destination.dtype)
    return torch.equal(copy.destination, expected)


def test_weights_arrive_through_few_buffers() -> None:
    weights, copies, loaded = make_copies(), LateCopies(), list[int]()
    upload_weights(weights, copies, loaded.append, SIZES)
    assert all(arrived(weight) for weight in weights)
    total = sum(weight.destination.nbytes for weight in weights)
    assert sum(loaded) == total
    assert copies.num_pinned == SIZES.num_buffers
    assert all(copies.is_pinned(copy.source) for copy in copies.started)
    small = [copy for copy in copies.started if len(copy.source) > 1]
    assert max(copy.source.nbytes for copy in small) <= SIZES.piece_bytes
    assert total / 1800 < len(copies.started) <= 2 * total / SIZES.piece_bytes + len(weights)


def test_an_abort_leaves_nothing_on_its_way() -> None:
    weights, copies = make_copies(), LateCopies()

    def stop(num_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upload_weights(weights, copies, stop, SIZES)
    assert all(copy.is_done for copy in copies.started)


def test_an_error_of_a_copy_is_the_callers() -> None:
    class Failing(LateCopies):
        def start(self, source: Tensor, destination: Tensor | None) -> tuple[Tensor, LateCopy]:
            if source.shape == (33, 21):
                raise RuntimeError("CUDA error: an illegal address")
            return super().start(source, destination)

    copies = Failing()
    sizes = UploadSizes(num_threads=3, num_buffers=4, piece_bytes=4000)
    with pytest.raises(RuntimeError, match="an illegal address"):
        upload_weights(make_copies(), copies, lambda _: None, sizes)
    assert all(copy.is_done for copy in copies.started)


def test_no_weights_need_no_memory() -> None:
    copies = LateCopies()
    upload_weights([], copies, lambda _: None)
    assert copies.num_pinned == 0
