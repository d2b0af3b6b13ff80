"""`pdserve bench step`: what it can be told, and a whole run on a model of no size."""

from __future__ import annotations

import json
import os
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from pdserve.commands.bench.checkpoints.random_checkpoint import (
    kept_checkpoint,
    write_random_checkpoint,
)
from pdserve.commands.bench.step import model_bench
from pdserve.commands.bench.step.cases import StepCase
from pdserve.commands.bench.step.config import StepBenchConfig
from pdserve.commands.bench.step.model_bench import StepBench, fill_with_numbers
from pdserve.commands.bench.step.run import computing_on
from pdserve.commands.bench.step.yardsticks import ProductShape
from pdserve.commands.cli.main import main
from pdserve.engine.kv.cache import TORCH_DTYPES
from pdserve.engine.kv.coded_rows import decoded
from pdserve.kv import KvDtype, KvLayout
from pdserve.node.device_ranks.start import start_device_ranks
from pdserve.node.start.cores import CorePlan
from pdserve.node.start.model import NodeModel
from pdserve.shared.errors import ConfigError
from tests.matrix import matrix
from tests.unit.commands.bench.checkpoints.test_random_checkpoint import TINY
from tests.unit.node.device_ranked import forked_rank, model_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_random_checkpoint(tmp_path / "tiny", shape=TINY)


def bench(folder: Path, *flags: str) -> int:
    short = ["--batches=1,3", "--contexts=20", "--prompts=9,10000", "--budget-s=0.01"]
    return main(["bench", "step", f"--shape={folder}", "--threads=1", *short, *flags])


@pytest.mark.usefixtures("cores")
def test_json_has_rows_skipped_cases_and_the_machine(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(folder, "--json", "--kv-memory=8MiB") == 0
    report = json.loads(capsys.readouterr().out)
    shapes = [(row["phase"], row["batch"], row["context"]) for row in report["rows"]]
    assert shapes == [("decode", 1, 20), ("decode", 3, 20), ("prefill", 1, 9)]
    for row in report["rows"]:
        assert row["floor_ratio"] == pytest.approx(row["p50_ms"] / row["floor_ms"])
        assert 0 < row["overhead_ms"] < row["p50_ms"]
        assert row["min_ms"] <= row["p50_ms"]
    assert [(skip["context"], skip["reason"]) for skip in report["skipped"]] == [
        (10000, "the model takes 8192 tokens")
    ]
    assert report["machine"]["read_gb_per_s"] >= report["machine"]["yardstick_read_gb_per_s"]
    assert report["machine"]["threads"] == 1


@pytest.mark.long
@pytest.mark.usefixtures("cores")
def test_weights_of_8_bits_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(folder, "--json", "--quantization=int8") == 0
    report = json.loads(capsys.readouterr().out)
    assert {row["weights"] for row in report["rows"]} == {"int8"}


@pytest.mark.long
@pytest.mark.usefixtures("cores")
def test_steps_beside_neighbours_are_a_table_of_their_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(folder, "--json", "--beside=1") == 0
    report = json.loads(capsys.readouterr().out)
    for row in report["rows"]:
        assert row["neighbours"]["alone_ms"] > 0
        assert row["neighbours"]["ratio"] > 0
    assert bench(folder, "--beside=1") == 0
    assert "lost cores" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.usefixtures("cores")
def test_people_see_what_was_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(folder) == 0
    out = capsys.readouterr().out
    assert "best seen" in out
    assert "lost cores" not in out
    assert "not measured: prefill 1 x 10000: the model takes 8192 tokens" in out


@pytest.mark.long  # those of one are by default
@pytest.mark.usefixtures("cores")
def test_steps_of_two_ranks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(folder, "--json", "--tensor-parallel=2") == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["rows"]) == 3


class Constant:
    """Yardsticks that measure nothing."""

    product_shape = ProductShape(1, 1, 1)
    cache_bytes = 0

    def read_rate(self) -> float:
        return 1.0

    def product_rate(self) -> float:
        return 2.0


@pytest.mark.long  # ranks that share one do by default
@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize(("num_ranks", "num_stages"), [(2, 1), (1, 2)])
def test_steps_of_ranks_that_have_a_device_each(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, num_stages: int
) -> None:
    """Here each has a CPU, and torch computes, as on GPUs."""
    start = partial(start_device_ranks, start=forked_rank)
    monkeypatch.setattr(model_bench, "start_device_ranks", start)
    cores = CorePlan(2, *[tuple(sorted(os.sched_getaffinity(0)))] * 2)
    model = model_of(folder, num_ranks, num_stages=num_stages)
    with closing(StepBench(model, cores, Constant())) as steps:
        for case in (StepCase("decode", 2, 20), StepCase("prefill", 1, 30)):
            found = steps.step(case.rows)
            assert 0 < found.model_s < found.total_s
        assert (steps.read_rate(), steps.product_rate()) == (1.0, 2.0)
        assert steps._runner.kv_cache.pool[5:].std().item() == pytest.approx(1.0, abs=0.1)


def planned(monkeypatch: pytest.MonkeyPatch, folder: Path, num_ranks: int) -> NodeModel:
    """As for GPUs of which there are four."""
    model = replace(model_of(folder, num_ranks), device=torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    return model


def test_gpus_are_named_and_have_no_threads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (planned(monkeypatch, folder, num_ranks) for num_ranks in (1, 2))
    assert computing_on(one, 2) == ("GPU 1", 0, "auto attention, CUDA graphs")
    assert computing_on(replace(two, has_graphs=False, attention="triton"), 2) == (
        "2 x GPU 1",
        0,
        "triton attention, no CUDA graphs",
    )


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--shape=7b"], "no directory, no GGUF file and none of demo-14m"),
        (["--quick", "--batches=2", "--prompts=128"], "--quick measures none"),
        (["--kv-memory=much"], "is not a size"),
    ],
)
def test_the_users_fault_is_told(
    flags: list[str], complaint: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "step", f"--shape={folder}", *flags]) == 2
    assert complaint in capsys.readouterr().err


def test_quick_is_less_of_everything() -> None:
    whole, quick = StepBenchConfig(), StepBenchConfig(quick=True)
    assert set(quick.grid.cases()) < set(whole.grid.cases())
    assert quick.seconds < whole.seconds
    with pytest.raises(ConfigError):
        StepBenchConfig(quick=True, batches=[3], prompts=[7]).grid  # noqa: B018


@pytest.mark.parametrize(
    "dtype",
    matrix(
        [KvDtype.FLOAT32, KvDtype.BFLOAT16, KvDtype.INT8, KvDtype.FP8],
        {KvDtype.BFLOAT16, KvDtype.FP8},
    ),
)
def test_the_pool_is_full_of_numbers(dtype: KvDtype) -> None:
    layout = KvLayout.gqa(layers=2, heads=2, head_dim=60, block_size=16, dtype=dtype)
    flat = torch.zeros((16 << 20) // layout.block_bytes * layout.block_bytes, dtype=torch.uint8)
    fill_with_numbers(flat.numpy(), layout)
    elements = flat.view(TORCH_DTYPES[dtype]).view(-1, *layout.block_shape)
    values = decoded(elements[-100:])
    assert values.std().item() == pytest.approx(1, abs=0.05)


def test_a_named_checkpoint_is_written_once(tmp_path: Path) -> None:
    kept = kept_checkpoint(tmp_path / "caches", "demo-14m")
    first = (kept / "model.safetensors").stat()
    assert kept_checkpoint(tmp_path / "caches", "demo-14m") == kept
    again = (kept / "model.safetensors").stat()
    assert (first.st_ino, first.st_mtime_ns) == (again.st_ino, again.st_mtime_ns)
    assert [path.name for path in (tmp_path / "caches").iterdir()] == [kept.name]
