"""A checkpoint into packed weights: the same from files, from memory and from the cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdserve.engine.models.config import load_model_config
from pdserve.engine.models.parameters import allocate_weights
from pdserve.engine.native.load import load_native_weights
from pdserve.engine.native.packed_cache import PackedCache
from pdserve.engine.native.packed_folder import packed_files
from pdserve.engine.native.weights import NativeWeights
from pdserve.engine.plan.forms import BFLOAT16, FLOAT32, FP8, INT8, WeightForm
from pdserve.engine.plan.model import ModelPlan
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.shared.errors import MissingTensor, ModelError
from tests.checkpoints import make_checkpoint
from tests.matrix import matrix
from tests.packed_weights import pack_weights
from tests.plans import plan_in

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True, "intermediate_size": 104, "head_dim": 20}),
    ("qwen2", {}),
    ("qwen3", {"max_shard_size": "100KB"}),
    ("mixtral", {}),
    ("qwen3_moe", {"mlp_only_layers": [0]}),
]


@pytest.fixture
def cache(tmp_path: Path) -> PackedCache:
    return PackedCache(tmp_path / "cache", 1 << 30, wait_s=30.0)


def load(
    path: Path,
    dtype: torch.dtype = torch.float32,
    form: WeightForm = FLOAT32,
    cache: PackedCache | None = None,
    on_progress: Callable[[float], None] = lambda _: None,
) -> NativeWeights:
    checkpoint = resolve_checkpoint(str(path))
    config = load_model_config(checkpoint)
    plan = ModelPlan.of(config, form=form)
    return load_native_weights(checkpoint, plan, dtype, cache, on_progress)


def from_memory(path: Path, dtype: torch.dtype, form: WeightForm) -> NativeWeights:
    """By way of plain weights, as torch would compute with them."""
    config = load_model_config(resolve_checkpoint(str(path)))
    weights = allocate_weights(plan_in(config, dtype), dtype, torch.device("cpu"))
    tensors: dict[str, Tensor] = {}
    for file in path.glob("*.safetensors"):
        tensors |= load_file(file)
    for name, slot in weights.slots.items():
        slot.destination.copy_(tensors[name])
    return pack_weights(weights, config, form)


def leaves(value: Any, name: str = "weights") -> Iterator[tuple[str, Any]]:
    if is_dataclass(value):
        for field in fields(value):
            yield from leaves(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, list | dict):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f"{name}[{key}]")
    else:
        yield name, value


def assert_same(one: NativeWeights, other: NativeWeights) -> None:
    ones, others = dict(leaves(one)), dict(leaves(other))
    assert ones.keys() == others.keys()
    for name, value in ones.items():
        if isinstance(value, Tensor):
            assert value.dtype == others[name].dtype, name
            assert torch.equal(value, others[name]), name
        else:
            assert value == others[name], name


@pytest.mark.parametrize(("family", "overrides"), matrix(FAMILIES, 3))
@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        (torch.float32, FLOAT32),
        (torch.bfloat16, BFLOAT16),
        (torch.float32, INT8),
        (torch.bfloat16, INT8),
        (torch.bfloat16, FP8),
    ],
)
def test_weights_are_those_of_the_checkpoint(
    tmp_path: Path,
    cache: PackedCache,
    family: str,
    overrides: dict[str, Any],
    dtype: torch.dtype,
    form: WeightForm,
) -> None:
    path = make_checkpoint(tmp_path / "model", family, dtype=dtype, **overrides)
    expected = from_memory(path, dtype, form)
    assert_same(load(path, dtype, form), expected)
    assert_same(load(path, dtype, form, cache), expected)
    assert_same(load(path, dtype, form, cache), expected)
    assert len(packed_files(cache.folder)) == 1


def test_an_embedding_of_another_type_is_converted_and_kept(
    tmp_path: Path, cache: PackedCache
) -> None:
    path = make_checkpoint(tmp_path / "model", "llama", dtype=torch.float32)
    expected = from_memory(path, torch.bfloat16, BFLOAT16)
    for _ in range(2):
        weights = load(path, torch.bfloat16, BFLOAT16, cache)
        assert torch.equal(weights.embedding, expected.embedding)
        assert torch.equal(weights.lm_head.weights, expected.lm_head.weights)
    assert ".packed" in mappings(weights.embedding)


def mappings(tensor: Tensor) -> str:
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, end = (int(text, 16) for text in line.split()[0].split("-"))
            if start <= tensor.data_ptr() < end:
                return line
    raise AssertionError("the tensor lies nowhere")


def test_nothing_is_copied_at_the_second_start(tmp_path: Path, cache: PackedCache) -> None:
    path = make_checkpoint(tmp_path / "model", "llama", tie_word_embeddings=True)
    load(path, cache=cache)
    weights = load(path, cache=cache)
    assert "model.safetensors" in mappings(weights.embedding)
    for name, value in leaves(weights):
        if isinstance(value, Tensor) and name != "weights.embedding":
            assert ".packed" in mappings(value), name
            assert value.data_ptr() % 64 == 0, name


def test_each_kind_and_dtype_has_its_file(tmp_path: Path, cache: PackedCache) -> None:
    path = make_checkpoint(tmp_path / "model", "llama")
    for dtype in (torch.float32, torch.bfloat16):
        load(path, dtype, INT8, cache)
    load(path, torch.bfloat16, BFLOAT16, cache)
    assert len(packed_files(cache.folder)) == 3


def change_values(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, path / "model.safetensors")


def touch(path: Path) -> None:
    os.utime(path / "model.safetensors", (1, 1))


@pytest.mark.parametrize("change", [change_values, touch])
def test_a_checkpoint_that_was_changed_is_packed_anew(
    tmp_path: Path, cache: PackedCache, change: Callable[[Path], None]
) -> None:
    path = make_checkpoint(tmp_path / "model", "llama")
    load(path, cache=cache)
    change(path)
    weights = load(path, cache=cache)
    assert_same(weights, from_memory(path, torch.float32, FLOAT32))
    assert len(packed_files(cache.folder)) == 2


def test_a_bad_checkpoint_is_told_though_its_weights_are_in_the_cache(
    tmp_path: Path, cache: PackedCache
) -> None:
    path = make_checkpoint(tmp_path / "model", "llama")
    load(path, cache=cache)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(MissingTensor, match=r"model\.norm\.weight"):
        load(path, cache=cache)


def test_what_cannot_be_quantised_is_named_and_nothing_is_kept(
    tmp_path: Path, cache: PackedCache
) -> None:
    path = make_checkpoint(tmp_path / "model", "llama")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj"):
        load(path, form=INT8, cache=cache)
    assert packed_files(cache.folder) == []
    assert not list(cache.folder.glob("*.new"))


def test_progress_goes_from_matrix_to_matrix(tmp_path: Path, cache: PackedCache) -> None:
    path = make_checkpoint(tmp_path / "model", "llama")
    first: list[float] = []
    load(path, cache=cache, on_progress=first.append)
    assert first == sorted(first)
    assert len(set(first)) == 4 * 2 + 1  # of each layer, and the head
    second: list[float] = []
    load(path, cache=cache, on_progress=second.append)
    assert (first[-1], second) == (1.0, [1.0])
