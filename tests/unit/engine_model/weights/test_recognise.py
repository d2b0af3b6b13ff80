"""What people name as a model and is none: what it is, and what they are told to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.demo_model import CHECKPOINT_PATH
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.model_files.recognise import FileKind, recognise
from pdserve.model_files.refusal import refuse_unless_served
from pdserve.shared.errors import ConfigError, ModelError

CONFIG = {"architectures": ["LlamaForCausalLM"]}
GPTQ = {"quant_method": "gptq", "bits": 4}
# name |-> files of a folder, content of those that count; and what is said of it
FOLDERS = {
    "gguf": ({"q4.gguf": b"GGUF"}, FileKind.GGUF, "q4.gguf"),
    "gguf-with-config": (
        {"config.json": CONFIG, "q.gguf": b""},
        FileKind.GGUF,
        r"file: .*/q\.gguf",
    ),
    "adapter": (
        {
            "adapter_config.json": {"base_model_name_or_path": "a/b"},
            "adapter_model.safetensors": b"",
        },
        FileKind.ADAPTER,
        r"name its model \(a/b\) with --model, and add --adapters NAME=",
    ),
    "hqq": (
        {"config.json": {**CONFIG, "quantization_config": {"quant_method": "hqq", "nbits": 4}}},
        FileKind.QUANTISED,
        r"\(hqq, 4 bits\).*GGUF, AWQ.*--quantization int8",
    ),
    "quanto": (
        {"config.json": {**CONFIG, "quantization_config": {"quant_method": "quanto"}}},
        FileKind.QUANTISED,
        r"\(quanto\)",
    ),
    "mlx": (
        {"config.json": {**CONFIG, "quantization": {"bits": 4}}, "model.safetensors": b""},
        FileKind.MLX,
        r"\(mlx, 4 bits\)",
    ),
    "npz": ({"config.json": CONFIG, "weights.npz": b""}, FileKind.MLX, "MLX"),
    "pickle": (
        {"config.json": CONFIG, "pytorch_model.bin": b""},
        FileKind.PICKLE,
        "only safetensors",
    ),
    "pt": ({"model.pt": b"PK\x03\x04"}, FileKind.PICKLE, "model.pt"),
    "onnx": ({"config.json": CONFIG, "onnx/model.onnx": b""}, FileKind.ONNX, "save_pretrained"),
    "diffusers": ({"model_index.json": {}, "unet/config.json": {}}, FileKind.DIFFUSERS, "language"),
    "meta": ({"params.json": {}, "consolidated.00.pth": b""}, FileKind.ORIGINAL, "ends in -hf"),
    "mistral": ({"consolidated.safetensors": b""}, FileKind.ORIGINAL, "convert it"),
    "flax": ({"config.json": CONFIG, "flax_model.msgpack": b""}, FileKind.OTHER_FRAMEWORK, "flax"),
    "openvino": ({"openvino_model.xml": b""}, FileKind.OTHER_FRAMEWORK, "openvino"),
    "parent": ({"a-model/config.json": CONFIG}, FileKind.PARENT, "name its folder: .*a-model"),
    "models--org--name": (
        {"snapshots/1/config.json": CONFIG},
        FileKind.HUB_CACHE,
        "--model org/name",
    ),
    "tokenizer": ({"tokenizer.json": {}}, FileKind.TOKENIZER, "config.json, safetensors"),
    "empty": ({}, FileKind.EMPTY, "or a folder with"),
    "notes": ({"notes.txt": b""}, FileKind.UNKNOWN, r"no config\.json"),
    "alone": ({"model.safetensors": b""}, FileKind.WEIGHTS, r"it has no config\.json"),
    "torn": (
        {"config.json": CONFIG, "other.safetensors": b""},
        FileKind.WEIGHTS,
        "model.safetensors",
    ),
}
FILES = {
    "a.gguf": (b"GGUF", FileKind.GGUF, "damaged: it ends at byte 4"),
    "no-suffix": (b"GGUF\x03", FileKind.GGUF, "damaged"),
    "old.bin": (b"tjgg", FileKind.GGML, "take a GGUF file"),
    "model.safetensors": (b"\x08", FileKind.WEIGHTS, "name its folder"),
    "pytorch_model.bin": (b"\x80\x02", FileKind.PICKLE, "only safetensors"),
    "model.onnx": (b"\x08\x07", FileKind.ONNX, "ONNX"),
    "model.zip": (b"PK\x03\x04", FileKind.ARCHIVE, "unpack it"),
    "model.tar.gz": (b"\x1f\x8b", FileKind.ARCHIVE, "unpack it"),
    "README.md": (b"# Hi", FileKind.UNKNOWN, "no model"),
}


def write(folder: Path, files: dict[str, object]) -> Path:
    folder.mkdir()
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_recognised_and_refused_with_what_to_do(name: str, tmp_path: Path) -> None:
    files, kind, said = FOLDERS[name]
    folder = write(tmp_path / name, files)
    assert recognise(folder).kind is kind
    with pytest.raises(ModelError, match=said) as info:
        resolve_checkpoint(str(folder))
    assert f"is {kind.value}" in str(info.value)


@pytest.mark.parametrize(
    ("files", "detail"),
    [
        ({"config.json": {"quantization_config": {"quant_method": "awq", "bits": 4}}}, "awq, 4"),
        ({"config.json": {}, "quantize_config.json": GPTQ}, "gptq, 4 bits"),
        ({"config.json": {}, "quant_config.json": {"w_bit": 4}}, "awq, 4"),
        ({"config.json": {"quantization_config": {"load_in_4bit": True}}}, "bitsandbytes, 4"),
        ({"config.json": {"compression_config": {"quant_method": "compressed-tensors"}}}, "compr"),
    ],
)
def test_quantised_checkpoints_are_recognised_and_left_to_their_readers(
    files: dict[str, object], detail: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "m", files | {"model.safetensors": bytes(8)})
    found = recognise(folder)
    assert found.kind is FileKind.QUANTISED
    assert found.detail.startswith(detail)
    refuse_unless_served(found)


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_recognised_and_refused_with_what_to_do(name: str, tmp_path: Path) -> None:
    content, kind, said = FILES[name]
    file = tmp_path / name
    file.write_bytes(content)
    assert recognise(file).kind is kind
    with pytest.raises(ModelError, match=said):
        resolve_checkpoint(str(file))


def test_a_checkpoint_is_one_with_or_without_its_weights(tmp_path: Path) -> None:
    assert recognise(CHECKPOINT_PATH).kind is FileKind.CHECKPOINT
    small = write(tmp_path / "small", {"config.json": CONFIG, "tokenizer.json": {}})
    assert recognise(small, with_weights=False).kind is FileKind.CHECKPOINT
    with_adapter = write(
        tmp_path / "merged",
        {"config.json": CONFIG, "model.safetensors": b"", "adapter_config.json": {}},
    )
    assert recognise(with_adapter).kind is FileKind.CHECKPOINT


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "written as Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "written as Qwen/Qwen3-0.6B"),
        ("hf://Qwen/Qwen3-0.6B", "written as Qwen/Qwen3-0.6B"),
        ("{}/tiny-modle", "did you mean .*/tiny-model"),
        ("{}/nowhere/model", "nor .*/nowhere"),
    ],
)
def test_a_path_that_does_not_exist_is_told_with_what_is_meant(
    model: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "tiny-model").mkdir()
    with pytest.raises(ConfigError, match=said):
        resolve_checkpoint(model.format(tmp_path))
