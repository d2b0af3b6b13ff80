"""How much longer decode steps take on fewer cores, as a node measures it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pdserve import _native
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.request import Scheduled
from pdserve.node.profiling import slowdowns as measuring
from pdserve.node.profiling.slowdowns import core_ladder, measure_slowdowns, slowdowns_of
from pdserve.node.profiling.steps import StepLimits
from pdserve.shared.errors import RequestCancelled

LIMITS = StepLimits(
    token_budget=64,
    max_batch_size=8,
    max_model_len=256,
    num_blocks=64,
    block_size=16,
    vocab_size=320,
)


class CountingRunner:
    """Notes with how many threads, and with how many rows, it computed."""

    model_s = 0.0
    launcher = None

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def prepare(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> Callable[[], list[None]]:
        def compute() -> list[None]:
            self.steps.append((_native.num_threads(), len(rows)))
            return [None] * len(rows)

        return compute

    def foresee(self, rows: Sequence[Scheduled]) -> None:
        """Nothing to prepare."""


@pytest.mark.parametrize(
    ("num_cores", "ladder"),
    [(2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 3, 4]), (5, [1, 2, 4, 5]), (16, [1, 2, 4, 8, 15, 16])],
)
def test_which_numbers_are_measured(num_cores: int, ladder: list[int]) -> None:
    assert core_ladder(num_cores) == ladder


def test_factors_are_means_and_never_fall_with_fewer_cores() -> None:
    found = slowdowns_of({1: [4.0, 9.0], 2: [2.2, 3.0], 3: [1.9, 2.8], 4: [2.0, 3.0]})
    assert found.cores == [1, 2, 3, 4]
    assert found.factors == pytest.approx([2.5, 1.05, 1.0, 1.0])


def test_decode_steps_are_run_with_all_these_threads_and_these_are_restored() -> None:
    runner, before = CountingRunner(), _native.num_threads()
    found = measure_slowdowns(LIMITS, runner, 5)
    assert list(found.cores) == [1, 2, 4, 5]
    assert _native.num_threads() == before
    rows = {rows for _, rows in runner.steps}
    assert len(rows) == 2, "a small step and a larger one"
    for threads in (1, 2, 4, 5):
        mine = [step for step in runner.steps if step[0] == threads]
        assert len(mine) == 2 * (1 + measuring.ROUNDS)


def test_it_can_be_stopped() -> None:
    def stop() -> None:
        raise RequestCancelled("the node was stopped")

    before = _native.num_threads()
    with pytest.raises(RequestCancelled):
        measure_slowdowns(LIMITS, CountingRunner(), 4, stop)
    assert _native.num_threads() == before
