"""`pdserve bench step`: what it can be told, and a whole run on a model of no size."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pdserve import _native
from pdserve.bench.checkpoints.random_checkpoint import kept_checkpoint, write_random_checkpoint
from pdserve.bench.step.config import StepBenchConfig
from pdserve.bench.step.model_bench import fill_with_numbers
from pdserve.cli.main import main
from pdserve.errors import ConfigError
from tests.unit.bench.test_random_checkpoint import TINY


@pytest.fixture
def cores() -> Iterator[None]:
    """What a run changes for the whole process is as it was."""
    cpus, threads, native = os.sched_getaffinity(0), torch.get_num_threads(), _native.num_threads()
    yield
    os.sched_setaffinity(0, cpus)
    torch.set_num_threads(threads)
    _native.set_num_threads(native)


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


@pytest.mark.usefixtures("cores")
def test_weights_of_8_bits_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(folder, "--json", "--quantization=int8") == 0
    report = json.loads(capsys.readouterr().out)
    assert {row["weights"] for row in report["rows"]} == {"int8"}


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


@pytest.mark.usefixtures("cores")
def test_people_see_what_was_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(folder) == 0
    out = capsys.readouterr().out
    assert "best seen" in out
    assert "lost cores" not in out
    assert "not measured: prefill 1 x 10000: the model takes 8192 tokens" in out


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--shape=7b"], "neither a directory nor one of demo-14m"),
        (["--quick", "--batches=2", "--prompts=128"], "--quick measures none"),
        (["--kv-memory=much"], "is not a size"),
    ],
)
def test_the_users_fault_is_told(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "step", *flags]) == 2
    assert complaint in capsys.readouterr().err


def test_quick_is_less_of_everything() -> None:
    whole, quick = StepBenchConfig(), StepBenchConfig(quick=True)
    assert set(quick.grid.cases()) < set(whole.grid.cases())
    assert quick.seconds < whole.seconds
    with pytest.raises(ConfigError):
        StepBenchConfig(quick=True, batches=[3], prompts=[7]).grid  # noqa: B018


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_pool_is_full_of_numbers(dtype: torch.dtype) -> None:
    flat = torch.zeros((16 << 20) + 4096, dtype=torch.uint8)
    fill_with_numbers(flat.numpy(), dtype)
    values = flat.view(dtype)[-100_000:].float()
    assert values.std().item() == pytest.approx(1, abs=0.05)


def test_a_named_checkpoint_is_written_once(tmp_path: Path) -> None:
    kept = kept_checkpoint(tmp_path / "caches", "demo-14m")
    first = (kept / "model.safetensors").stat()
    assert kept_checkpoint(tmp_path / "caches", "demo-14m") == kept
    again = (kept / "model.safetensors").stat()
    assert (first.st_ino, first.st_mtime_ns) == (again.st_ino, again.st_mtime_ns)
    assert [path.name for path in (tmp_path / "caches").iterdir()] == [kept.name]
