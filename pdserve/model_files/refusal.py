"""Why what was found is not served, and what to do instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pdserve.model_files.recognise import FileKind, Recognised
from pdserve.shared.errors import ModelError

_HUB_ADDRESS: Final = re.compile(
    r"(?:(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)|hf:/)/([^/]+/[^/]+)(?:/.*)?"
)
_SERVED: Final = "name a GGUF file, or a folder with config.json, safetensors and tokenizer.json"
_CONVERT: Final = "take its safetensors, or convert it: load and save_pretrained() in transformers"
_UNQUANTISED: Final = (
    "take a GGUF, AWQ, GPTQ or FP8 version of it, or name the model that it was made from (with "
    "--quantization int8 for 8 bits)"
)
# Methods of which other versions are found; the rest are read, or refused by their fields.
_UNREAD: Final = frozenset({"hqq", "quanto", "an unknown method"})
_ADVICE: Final[Mapping[FileKind, str]] = {
    FileKind.QUANTISED: _UNQUANTISED,
    FileKind.MLX: _UNQUANTISED,
    FileKind.GGML: "take a GGUF file of it",
    FileKind.PICKLE: f"only safetensors are loaded: {_CONVERT}",
    FileKind.ONNX: _CONVERT,
    FileKind.OTHER_FRAMEWORK: _CONVERT,
    FileKind.ORIGINAL: "convert it with transformers, or take the repository that ends in -hf",
    FileKind.DIFFUSERS: f"only language models are served: {_SERVED}",
    FileKind.TOKENIZER: _SERVED,
    FileKind.EMPTY: _SERVED,
    FileKind.UNKNOWN: f"it has no config.json: {_SERVED}",
    FileKind.ARCHIVE: "unpack it, and name the folder",
}


def refuse_unless_served(found: Recognised) -> None:
    """Raise ModelError, which says what it is and what to do, unless it may be served."""
    path, kind = found.path, found.kind
    if kind in (FileKind.CHECKPOINT, FileKind.GGUF) and not found.other:
        return
    if kind is FileKind.QUANTISED and found.detail.split(",")[0] not in _UNREAD:
        return
    is_named = found.detail == path.name and kind not in (FileKind.QUANTISED, FileKind.MLX)
    detail = f" ({found.detail})" if found.detail and not is_named else ""
    raise ModelError(f"{path} is {kind.value}{detail}: {_advice(found)}")


def is_page_of_hub(model: str) -> bool:
    """Whether it is the address of a model's page on the hub."""
    return _HUB_ADDRESS.fullmatch(model) is not None


def meant_model(model: str) -> str:
    """Say which model was meant by a path that does not exist; nothing if nobody knows."""
    if address := _HUB_ADDRESS.fullmatch(model):
        return f": a model of the hub is written as {address[1]}"
    path = Path(model).expanduser()
    parent = path.parent
    if not parent.is_dir():
        return f", nor {parent}"
    folders = [entry.name for entry in parent.iterdir() if entry.is_dir()]
    near = difflib.get_close_matches(path.name, folders, n=1)
    return f"; did you mean {parent / near[0]}?" if near else ""


def _advice(found: Recognised) -> str:
    if found.kind is FileKind.ADAPTER:
        base = f" ({found.other})" if found.other else ""
        return f"name its model{base} with --model, and add --adapters NAME={found.path}"
    if found.kind is FileKind.WEIGHTS and not found.other:
        if not (found.path / "config.json").is_file():
            return f"it has no config.json: {_SERVED}"
        return f"its weights must be model.safetensors, or shards with an index: {_SERVED}"
    if found.kind is FileKind.HUB_CACHE:
        return f"write --model {found.other}"
    if found.kind is FileKind.GGUF:
        return f"name the file: {found.other}"
    if found.other:
        return f"name its folder: {found.other}"
    return _ADVICE[found.kind]
