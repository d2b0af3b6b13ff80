"""Which file of packed weights a node reads ahead while it loads its modules."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from pdserve.node.start import prefetch
from pdserve.node.start.prefetch import prefetch_weights
from pdserve.settings.config import CheckpointConfig, EngineConfig, NodeConfig


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read ahead, once `join` has returned."""
    names: list[str] = []
    monkeypatch.setattr(
        prefetch, "map_pages", lambda fd: names.append(os.readlink(f"/proc/self/fd/{fd}"))
    )
    return names


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where packed weights are kept; still empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "pdserve" / "weights"
    folder.mkdir(parents=True)
    return folder


def prefetch_and_wait(model: str, limit: str = "1GiB") -> None:
    config = NodeConfig(
        checkpoint=CheckpointConfig(model=model),
        engine=EngineConfig(packed_limit=limit),
    )
    before = set(threading.enumerate())
    prefetch_weights(config)
    for thread in set(threading.enumerate()) - before:
        thread.join()


@pytest.mark.parametrize("by_path", [True, False])
def test_the_file_that_was_last_used_for_the_model(
    folder: Path, tmp_path: Path, read: list[str], by_path: bool
) -> None:
    names = ["Qwen3-float32-1", "Qwen3-bfloat16-2", "Qwen3-bfloat16-int8-3", "Llama-bfloat16-4"]
    for used_s, name in enumerate(names):
        file = folder / f"{name}.packed"
        file.touch()
        os.utime(file, (used_s, used_s))
    (tmp_path / "models" / "Qwen3").mkdir(parents=True)
    prefetch_and_wait(str(tmp_path / "models" / "Qwen3") if by_path else "Qwen3")
    assert [Path(name).name for name in read] == ["Qwen3-bfloat16-int8-3.packed"]


def test_nothing_is_read_where_nothing_is(folder: Path, read: list[str]) -> None:
    folder.rmdir()
    prefetch_and_wait("Qwen3")
    folder.mkdir()
    (folder / "Llama-bfloat16-1.packed").touch()
    prefetch_and_wait("Qwen3")
    assert read == []


def test_nothing_is_read_where_none_are_kept(folder: Path, read: list[str]) -> None:
    (folder / "Qwen3-float32-1.packed").touch()
    prefetch_and_wait("Qwen3", limit="0")
    assert read == []
    prefetch_and_wait("Qwen3")
    assert len(read) == 1


@pytest.mark.filterwarnings("error")
def test_a_file_that_is_empty_is_passed_over(folder: Path) -> None:
    (folder / "Qwen3-float32-1.packed").touch()
    prefetch_and_wait("Qwen3")  # pytest warns of threads that raise
