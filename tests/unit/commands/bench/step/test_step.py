"""Steps beside yardsticks, with a clock that nobody else moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from pdserve.commands.bench.step.cases import Grid, StepCase, with_room
from pdserve.commands.bench.step.floor import Limit, Rates, Work
from pdserve.commands.bench.step.measurement import (
    LEAST_ROUNDS,
    Observed,
    StepTime,
    Threads,
    bench_row,
    best_product,
    best_read,
    observe,
)
from pdserve.commands.bench.step.yardsticks import (
    GPU_ROWS,
    GpuYardsticks,
    StreamingRead,
    largest_cache_bytes,
)
from pdserve.kv import KvDtype, KvLayout
from pdserve.measured.perf_model import StepRow
from tests.unit.commands.bench.step.test_floor import tiny, work_of

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=16, dtype=KvDtype.BFLOAT16)


class FakeBench:
    """A token takes a second, half of it outside the model; the machine gets slower each time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slowness = 1.0
        self.log: list[str] = []

    def step(self, rows: Sequence[StepRow]) -> StepTime:
        self.log.append(f"step {len(rows)}")
        seconds = self.slowness * sum(row.num_tokens for row in rows)
        self.now_s += seconds
        return StepTime(seconds, seconds / 2)

    def read_rate(self) -> float:
        self.log.append("read")
        return 1000.0 - len(self.log)

    def product_rate(self) -> float:
        self.log.append("product")
        return 10.0

    def now(self) -> float:
        return self.now_s


def test_a_grid_is_decodes_and_prompts() -> None:
    cases = list(Grid([1, 4], [128], [512]).cases())
    assert cases == [
        StepCase("decode", 1, 128),
        StepCase("decode", 4, 128),
        StepCase("prefill", 1, 512),
    ]
    assert cases[1].rows == (StepRow(1, 127, is_decoding=True),) * 4
    assert cases[2].rows == (StepRow(512, 0),)
    assert [case.num_tokens for case in cases] == [1, 4, 512]


def test_what_does_not_fit_is_told_and_never_shared() -> None:
    cases = [StepCase("decode", 2, 17), StepCase("decode", 3, 17), StepCase("prefill", 1, 65)]
    room = 4 * LAYOUT.block_bytes
    kept, skipped = with_room(iter(cases), LAYOUT, 64, room)
    assert kept == cases[:1]
    assert [(skip.batch, skip.context) for skip in skipped] == [(3, 17), (1, 65)]
    assert "of KV" in skipped[0].reason
    assert skipped[1].reason == "the model takes 64 tokens"


def test_steps_and_yardsticks_take_turns() -> None:
    bench = FakeBench()
    cases = [StepCase("decode", 1, 8), StepCase("decode", 2, 8)]
    work = work_of(tiny())
    observed = observe(cases, work, bench, 0.0, bench.now)
    turn = ["read", "product", "step 1", "read", "product", "step 2"]
    assert bench.log == ["step 1", "step 2", *turn * LEAST_ROUNDS]
    assert [len(seen.times) for seen in observed] == [LEAST_ROUNDS] * 2
    assert [rates.bytes_per_s for rates in observed[0].beside] == [997.0, 991.0, 985.0]


def test_time_that_is_left_is_used_and_not_more() -> None:
    bench = FakeBench()
    work = work_of(tiny())
    (seen,) = observe([StepCase("decode", 2, 8)], work, bench, 11.0, bench.now)
    assert len(seen.times) == 5  # 2 s each; the first, which does not count, is before


def observed(case: StepCase, work: Work, *totals_s: float) -> Observed:
    seen = Observed(case, work)
    for total_s in totals_s:
        seen.times.append(StepTime(total_s, total_s - 0.25))
        seen.beside.append(Rates(100.0, 1000.0))
    return seen


def test_a_row_is_the_median_over_the_best_floor() -> None:
    seen = observed(StepCase("decode", 4, 128), Work(400, 1000), 8.0, 6.0, 16.0)
    row = bench_row("m", "bfloat16", seen, Rates(200.0, 4000.0), Threads(2, 2))
    assert (row.p50_ms, row.min_ms, row.floor_ms) == (8000.0, 6000.0, 2000.0)
    assert row.limit is Limit.MEMORY
    assert row.floor_ratio == 4.0
    assert row.beside_ratio == 2.0
    assert row.overhead_ms == 250.0
    assert row.tokens_per_s == 0.5


def test_a_step_that_beats_the_yardstick_becomes_it() -> None:
    slow = observed(StepCase("decode", 1, 128), Work(400, 1000), 8.0)
    fast = observed(StepCase("prefill", 1, 512), Work(4000, 90_000), 20.0, 10.0)
    assert best_read([slow, fast], cache_bytes=100).seen_in == "prefill 1x512"
    assert best_read([slow, fast], cache_bytes=100).rate == 400.0
    assert best_read([slow, fast], cache_bytes=1001).seen_in == "yardstick"
    assert best_product([slow, fast]).rate == 9000.0
    assert best_product([slow]).seen_in == "yardstick"


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_streaming_read_reads_all_of_it(num_threads: int) -> None:
    read = StreamingRead(num_threads, num_bytes=8 * 1000)
    assert np.concatenate(read._parts).tolist() == list(range(1000))
    assert len(read._parts) == num_threads
    assert read.rate() > 0


class HalfSeconds:
    """A stopwatch: everything takes half a second."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def seconds(self, work: Callable[[], object]) -> float:
        result = work()
        assert isinstance(result, torch.Tensor)
        self.found.append(result)
        return 0.5


@pytest.mark.parametrize("num_devices", [1, 4])
def test_the_rates_of_gpus_add_up(num_devices: int) -> None:
    """All of what counts is really read and multiplied."""
    stopwatch = HalfSeconds()
    yardsticks = GpuYardsticks(
        (6, 10),
        torch.bfloat16,
        torch.device("cpu"),
        stopwatch,
        num_devices=num_devices,
        cache_bytes=50,
        read_bytes=4000,
    )
    assert yardsticks.read_rate() == num_devices * 4000 / 0.5
    assert yardsticks.product_rate() == num_devices * 2 * GPU_ROWS * 6 * 10 / 0.5
    assert yardsticks.cache_bytes == num_devices * 50
    total, product = stopwatch.found
    assert total.item() == 1000
    assert (product.shape, product.dtype) == ((GPU_ROWS, 10), torch.bfloat16)


def test_the_largest_cache_is_found(tmp_path: Path) -> None:
    for index, size in enumerate(["32K", "1024K", "32M"]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert largest_cache_bytes(tmp_path) == 32 << 20
    assert largest_cache_bytes(tmp_path / "none") == 0
