"""What a file or a folder is, of all that models are distributed as. Whether it is served is not
said here: see `refusal.py`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final


class FileKind(Enum):
    """What it is, in words that follow "is"."""

    CHECKPOINT = "a checkpoint in Hugging Face format"
    QUANTISED = "a quantised checkpoint"
    GGUF = "a model for llama.cpp (GGUF)"
    GGML = "a model for llama.cpp in a format before GGUF"
    ADAPTER = "an adapter (LoRA), which only changes another model"
    PICKLE = "a model with its weights in Python's pickle format"
    ONNX = "a model in ONNX format"
    MLX = "a model quantised for MLX"
    DIFFUSERS = "a pipeline of the diffusers library, which makes images"
    ORIGINAL = "a checkpoint in its makers' own format, without a config.json"
    OTHER_FRAMEWORK = "a model of another framework"
    WEIGHTS = "a file of weights alone"
    ARCHIVE = "an archive"
    PARENT = "a folder of models"
    HUB_CACHE = "a model's folder in the hub's cache"
    TOKENIZER = "a tokenizer without a model"
    EMPTY = "an empty folder"
    UNKNOWN = "no model"


@dataclass(frozen=True, slots=True)
class Recognised:
    """What is at a path."""

    path: Path
    kind: FileKind
    detail: str = ""  # a file that shows it; of a quantised model, the method and its bits
    other: str = ""  # the model that an adapter is for, or the path that should have been named


_BY_SUFFIX: Final = {
    ".gguf": FileKind.GGUF,
    ".ggml": FileKind.GGML,
    ".safetensors": FileKind.WEIGHTS,
    ".bin": FileKind.PICKLE,
    ".pt": FileKind.PICKLE,
    ".pth": FileKind.PICKLE,
    ".ckpt": FileKind.PICKLE,
    ".pkl": FileKind.PICKLE,
    ".onnx": FileKind.ONNX,
    ".npz": FileKind.MLX,
    ".h5": FileKind.OTHER_FRAMEWORK,
    ".msgpack": FileKind.OTHER_FRAMEWORK,
    ".pb": FileKind.OTHER_FRAMEWORK,
    ".tflite": FileKind.OTHER_FRAMEWORK,
    ".engine": FileKind.OTHER_FRAMEWORK,
    ".nemo": FileKind.OTHER_FRAMEWORK,
    ".mlmodel": FileKind.OTHER_FRAMEWORK,
    ".xml": FileKind.OTHER_FRAMEWORK,
    ".zip": FileKind.ARCHIVE,
    ".tar": FileKind.ARCHIVE,
    ".gz": FileKind.ARCHIVE,
    ".tgz": FileKind.ARCHIVE,
    ".7z": FileKind.ARCHIVE,
}
_BY_BEGINNING: Final = {
    b"GGUF": FileKind.GGUF,
    b"ggml": FileKind.GGML,
    b"lmgg": FileKind.GGML,
    b"tjgg": FileKind.GGML,
    b"PK\x03\x04": FileKind.PICKLE,  # torch.save
    b"\x80\x02": FileKind.PICKLE,
    b"\x1f\x8b": FileKind.ARCHIVE,
}
# Folders have these beside weights in another format; the first kind of which there is a file.
_FOLDER_KINDS: Final = (
    FileKind.GGUF,
    FileKind.PICKLE,
    FileKind.ONNX,
    FileKind.MLX,
    FileKind.OTHER_FRAMEWORK,
    FileKind.WEIGHTS,
    FileKind.ARCHIVE,
)
_NOT_WEIGHTS: Final = frozenset({"training_args.bin", "optimizer.pt", "scheduler.pt"})


def recognise(path: Path, *, with_weights: bool = True) -> Recognised:
    """Look at a file or a folder, without reading more than its small files.

    Args:
        path: that exists.
        with_weights: False: a folder that has only a model's small files is a checkpoint too.
    """
    if not path.is_dir():
        return _file(path)
    config = _json(path / "config.json")
    if (path / "adapter_config.json").is_file() and not _has_checkpoint(path):
        base = _json(path / "adapter_config.json").get("base_model_name_or_path")
        return Recognised(
            path, FileKind.ADAPTER, "adapter_config.json", base if type(base) is str else ""
        )
    if (path / "model_index.json").is_file() and not (path / "config.json").is_file():
        return Recognised(path, FileKind.DIFFUSERS, "model_index.json")
    if not (path / "config.json").is_file():
        return _without_config(path)
    if method := _quantisation(config, path):
        return Recognised(
            path, FileKind.MLX if method.startswith("mlx") else FileKind.QUANTISED, method
        )
    if not with_weights or _has_checkpoint(path):
        return Recognised(path, FileKind.CHECKPOINT)
    return _of_its_files(path) or Recognised(path, FileKind.CHECKPOINT)


def _file(path: Path) -> Recognised:
    with path.open("rb") as file:
        beginning = file.read(4)
    for sign, kind in _BY_BEGINNING.items():
        if beginning.startswith(sign) and path.suffix != ".zip":
            return Recognised(path, kind, path.name)
    if path.name == "config.json":
        return Recognised(path, FileKind.CHECKPOINT, path.name, str(path.parent))
    kind = _BY_SUFFIX.get(path.suffix.lower(), FileKind.UNKNOWN)
    return Recognised(path, kind, path.name, str(path.parent) if kind is FileKind.WEIGHTS else "")


def _has_checkpoint(folder: Path) -> bool:
    names = ("model.safetensors", "model.safetensors.index.json")
    return any((folder / name).is_file() for name in names)


def _without_config(folder: Path) -> Recognised:
    names = sorted(entry.name for entry in folder.iterdir())
    if not names:
        return Recognised(folder, FileKind.EMPTY)
    if "snapshots" in names and folder.name.startswith("models--"):
        model_id = folder.name.removeprefix("models--").replace("--", "/", 1)
        return Recognised(folder, FileKind.HUB_CACHE, "snapshots", model_id)
    if "params.json" in names or any(name.startswith("consolidated.") for name in names):
        shown = "params.json" if "params.json" in names else "consolidated.*"
        return Recognised(folder, FileKind.ORIGINAL, shown)
    if (found := _of_its_files(folder)) is not None:
        return found
    inner = [name for name in names if (folder / name / "config.json").is_file()]
    if inner:
        return Recognised(folder, FileKind.PARENT, inner[0], str(folder / inner[0]))
    if "tokenizer.json" in names or "tokenizer_config.json" in names:
        return Recognised(folder, FileKind.TOKENIZER, "tokenizer.json")
    return Recognised(folder, FileKind.UNKNOWN)


def _of_its_files(folder: Path) -> Recognised | None:
    """What its weights are, by their names; None: none that are known."""
    files = [file for file in folder.iterdir() if file.is_file() and file.name not in _NOT_WEIGHTS]
    files += [*(folder / "onnx").glob("*.onnx"), *folder.glob("openvino*/*.xml")]
    kinds = {_BY_SUFFIX.get(file.suffix.lower()): file.name for file in sorted(files, reverse=True)}
    kind = next((kind for kind in _FOLDER_KINDS if kind in kinds), None)
    if kind is None:
        return None
    other = str(folder / kinds[kind]) if kind is FileKind.GGUF else ""
    return Recognised(folder, kind, kinds[kind], other)


def _quantisation(config: dict[str, Any], folder: Path) -> str:
    """The method of a quantised model, and its bits; nothing: it is not quantised."""
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            return _method(config[key])
    if isinstance(config.get("quantization"), dict):
        return _method({"quant_method": "mlx", **config["quantization"]})
    for name, method in (
        ("quantize_config.json", "gptq"),
        ("quant_config.json", "awq"),
        ("hf_quant_config.json", "modelopt"),
    ):
        if (folder / name).is_file():
            return _method({"quant_method": method, **_json(folder / name)})
    return ""


def _method(fields: object) -> str:
    if not isinstance(fields, dict):
        return "an unknown method"
    method = fields.get("quant_method")
    if not isinstance(method, str):
        loads = any(key.startswith("load_in_") for key in fields)
        method = "bitsandbytes" if loads else "an unknown method"
    bits = next((fields[key] for key in ("bits", "w_bit", "nbits") if key in fields), None)
    if fields.get("load_in_4bit"):
        bits = 4
    return f"{method}, {bits} bits" if isinstance(bits, int) else method


def _json(file: Path) -> dict[str, Any]:
    """The object in a small file; empty if there is none, or it is damaged."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
