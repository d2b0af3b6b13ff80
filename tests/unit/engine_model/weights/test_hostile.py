"""Configs, tokenizers and headers that say anything at all: read or refused, and nothing else.

Sizes of 2**31 and more must be refused before anything of that size is made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.commands.cli import inspect_model
from pdserve.engine.models.config import load_model_config
from pdserve.engine.plan.forms import ActivationDtype
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.weights.load import load_torch_weights
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.model_files.gguf.config import config_of
from pdserve.model_files.gguf.model import GgufModel, open_gguf
from pdserve.model_files.gguf.tokenizer import end_ids, tokenizer_of
from pdserve.model_files.tokenizer import read_tokenizer
from pdserve.shared.errors import ModelError, PdserveError
from tests.checkpoints import edit_config, make_checkpoint
from tests.gguf_files import as_gguf
from tests.matrix import matrix

HUGE = (2**31 - 1, 2**31, 2**62, 10**40)
FLAT = (  # which is all that GGUF has
    *(0, -1, 1, *HUGE, 1.5, float("nan"), float("inf"), "", "x", True),
    *([], [1, 2], ["a"], [0.5, 0.5]),
)
HOSTILE = (*FLAT, [[]], [None], {}, {"a": 1}, {"1": 5}, {"5": {"content": 5}})
FAMILIES = ("llama", "gemma3", "mixtral", "qwen2_moe", "phi3", "olmo3", "cohere2", "glm4")


def load(path: Path) -> None:
    checkpoint = resolve_checkpoint(str(path))
    plan = ModelPlan.of(load_model_config(checkpoint))
    load_torch_weights(checkpoint, plan, ActivationDtype.FLOAT32, torch.device("cpu"))


def changed(
    content: dict[str, Any], *more: str, values: Sequence[Any] = HOSTILE
) -> Iterator[dict[str, Any]]:
    """Each field, and those of objects in it, absent or with each hostile value."""
    for key in (*content, *more):
        yield {name: value for name, value in content.items() if name != key}
        yield from (content | {key: value} for value in values)
        if isinstance(inner := content.get(key), dict) and inner:
            yield from (content | {key: other} for other in changed(inner))


@pytest.mark.long  # the fields of a GGUF file are changed by default
@pytest.mark.parametrize("family", matrix(FAMILIES, 1))
def test_fields_of_a_config(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "m", family)
    file = path / "config.json"
    for content in changed(json.loads(file.read_text())):
        file.write_text(json.dumps(content))
        with suppress(PdserveError):
            load(path)


@pytest.mark.parametrize("name", matrix(["tokenizer_config.json", "tokenizer.json"], 1))
def test_fields_of_a_tokenizer(name: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "m", "llama", num_hidden_layers=1)
    file = path / name
    more = ("added_tokens_decoder", "additional_special_tokens", "bos_token")
    for content in changed(json.loads(file.read_text()), *more):
        file.write_text(json.dumps(content))
        with suppress(PdserveError):
            read_tokenizer(path)


@pytest.mark.parametrize("family", matrix(("mixtral", "gemma3_text", "phi3", "qwen2_moe"), 1))
def test_values_of_a_gguf_file(family: str, tmp_path: Path) -> None:
    family = family.removesuffix("_text")
    made = make_checkpoint(tmp_path / "made", family, num_hidden_layers=1)
    as_gguf(made, tmp_path / "m.gguf", lambda name: "F32")
    model = open_gguf(tmp_path / "m.gguf")
    readers: tuple[Callable[[GgufModel], object], ...] = (
        lambda model: config_of(model, end_ids(model)),
        tokenizer_of,
    )
    for values in changed(dict(model.values), values=FLAT):
        other = GgufModel((replace(model.files[0], values=values),), model.tensors)
        for read in readers:
            with suppress(PdserveError):
                read(other)


@pytest.mark.parametrize("size", matrix(HUGE, {10**40}))
@pytest.mark.parametrize(
    "field",
    ["num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "num_local_experts"],
)
def test_huge_sizes_are_refused_before_they_are_allocated(
    field: str, size: int, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path / "m", "mixtral", num_hidden_layers=1)
    edit_config(path, **{field: size})
    with pytest.raises(ModelError, match=rf"{field}|the config makes it"):
        load(path)


@pytest.mark.parametrize("places", ["[8, 4]", "[-8, -4]", "[0, 1e999]", "[0, 99999999999]", '"ab"'])
def test_places_in_a_safetensors_header_are_checked(places: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "m", "llama", num_hidden_layers=1)
    header = f'{{"a": {{"dtype": "F32", "shape": [1], "data_offsets": {places}}}}}'.encode()
    content = len(header).to_bytes(8, "little") + header + bytes(64)
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged: its header"):
        resolve_checkpoint(str(path))


def test_inspect_says_what_loading_would_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_checkpoint(tmp_path / "m", "llama", num_hidden_layers=1)
    assert inspect_model.run(str(path), None) == 0
    edit_config(path, vocab_size=300)
    assert inspect_model.run(str(path), None) == 1
    with pytest.raises(ModelError) as info:
        load(path)
    assert f"no: {info.value}" in capsys.readouterr().out
