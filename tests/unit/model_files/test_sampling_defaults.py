"""How tokens are sampled where a request does not say: what a model's files recommend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.model_files.checkpoint import Checkpoint
from pdserve.model_files.sampling_defaults import PLAIN, SamplingDefaults, sampling_defaults
from pdserve.shared.errors import ModelError
from tests.gguf_files import gguf


def folder(path: Path, content: dict[str, Any]) -> Checkpoint:
    (path / "generation_config.json").write_text(json.dumps(content))
    return Checkpoint(path, "m", "r")


def file(path: Path, **values: float) -> Checkpoint:
    writer = gguf.GGUFWriter(path / "m.gguf", "llama")
    for key, value in values.items():
        add = writer.add_int32 if isinstance(value, int) else writer.add_float32
        add(f"general.sampling.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Checkpoint(path / "m.gguf", "m", "r")


def test_a_folder_recommends_by_its_generation_config(tmp_path: Path) -> None:
    assert sampling_defaults(Checkpoint(tmp_path, "m", "r")) == PLAIN
    found = sampling_defaults(
        folder(tmp_path, {"do_sample": False, "temperature": 0.6, "top_k": 64, "top_p": None})
    )
    assert found == SamplingDefaults(temperature=0.6, top_k=64)
    assert found.described() == "temperature 0.6, top_k 64"


def test_a_file_recommends_by_its_keys(tmp_path: Path) -> None:
    values = {"temp": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "penalty_repeat": 1.1}
    assert sampling_defaults(file(tmp_path, **values)) == SamplingDefaults(
        temperature=0.7, top_k=20, top_p=0.8, min_p=0.05, repetition_penalty=1.1
    )


def test_what_no_request_could_have_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"generation_config.json: temperature is 'hot': Expected"):
        sampling_defaults(folder(tmp_path, {"temperature": "hot"}))
    with pytest.raises(ModelError, match=r"general.sampling.top_p is 1.5: Expected .* <= 1"):
        sampling_defaults(file(tmp_path, top_p=1.5))
    with pytest.raises(ModelError, match=r"top_k is \[0, 0, .*: Expected `int`") as error:
        sampling_defaults(folder(tmp_path, {"top_k": [0] * 10_000}))
    assert len(str(error.value)) < 500
