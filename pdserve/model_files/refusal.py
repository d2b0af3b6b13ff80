"""Why what was found is not served, and what to do instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pdserve.model_files.recognise import Found, Kind
from pdserve.shared.errors import ModelError

_HUB_ADDRESS: Final = re.compile(
    r"(?:https?://(?:www\.)?(?:huggingface\.co|hf\.co)|hf:/)/([^/]+/[^/]+)(?:/.*)?"
)
_SERVED: Final = "name a GGUF file, or a folder with config.json, safetensors and tokenizer.json"
_CONVERT: Final = "take its safetensors, or convert it: load and save_pretrained() in transformers"
_ADVICE: Final[Mapping[Kind, str]] = {
    Kind.QUANTISED: "name the model that it was made from, and --quantization int8 for 8 bits",
    Kind.MLX: "name the model that it was made from",
    Kind.GGML: "take a GGUF file of it",
    Kind.PICKLE: f"only safetensors are loaded: {_CONVERT}",
    Kind.ONNX: _CONVERT,
    Kind.OTHER_FRAMEWORK: _CONVERT,
    Kind.ORIGINAL: "convert it with transformers, or take the repository that ends in -hf",
    Kind.DIFFUSERS: f"only language models are served: {_SERVED}",
    Kind.TOKENIZER: _SERVED,
    Kind.EMPTY: _SERVED,
    Kind.UNKNOWN: f"it has no config.json: {_SERVED}",
    Kind.ARCHIVE: "unpack it, and name the folder",
}


def refuse_unless_served(found: Found) -> None:
    """Raise ModelError, which says what it is and what to do, unless it may be served."""
    path, kind = found.path, found.kind
    if kind in (Kind.CHECKPOINT, Kind.GGUF) and not found.other:
        return
    is_named = found.detail == path.name and kind not in (Kind.QUANTISED, Kind.MLX)
    detail = f" ({found.detail})" if found.detail and not is_named else ""
    raise ModelError(f"{path} is {kind.value}{detail}: {_advice(found)}")


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


def _advice(found: Found) -> str:
    if found.kind is Kind.ADAPTER:
        base = f" ({found.other})" if found.other else ""
        return f"merge it into its model{base} with peft's merge_and_unload(), and name the result"
    if found.kind is Kind.WEIGHTS and not found.other:
        return f"its weights must be model.safetensors, or shards with an index: {_SERVED}"
    if found.kind is Kind.HUB_CACHE:
        return f"write --model {found.other}"
    if found.kind is Kind.GGUF:
        return f"name the file: {found.other}"
    if found.other:
        return f"name its folder: {found.other}"
    return _ADVICE[found.kind]
