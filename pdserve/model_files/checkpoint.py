"""Finds a model's files, in a directory or on the Hugging Face hub, and identifies their content.

No torch here: the coordinator resolves the same checkpoint for its tokenizer.

Two nodes exchange KV only if their `revision` is the same (it is part of the KV fingerprint). For a
hub model it is the commit. For a directory it is a hash of config.json and, for every weight file,
its name, size, header and a few bytes of each tensor: fine-tunes of one model differ only in these
bytes, and reading the files in full would double the time to start.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.errors import ConfigError, ModelError
from pdserve.model_files.git_lfs import refuse_pointer
from pdserve.model_files.recognise import recognise
from pdserve.model_files.refusal import meant_model, refuse_unless_served

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

# Listed one by one, because repositories often hold the same weights in other formats too.
_SMALL_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "chat_template.json",
    "modules.json",
    "1_Pooling/config.json",
    # By these a repository is told that is no checkpoint.
    "adapter_config.json",
    "model_index.json",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    INDEX_FILE,
]
_WEIGHT_FILES = [SINGLE_FILE, "model-*-of-*.safetensors"]
_SAMPLE_BYTES = 256


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory with config.json, weights and tokenizer, and the model's identity."""

    path: Path
    model_id: str  # hub id, or the directory's name
    revision: str  # hub commit, or a hash of the content

    def weight_files(self) -> list[Path]:
        """The safetensors files of the model, sorted by name.

        Raises:
            ModelError: there are none, or one that the index names is missing.
        """
        return weight_files(self.path)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file; None if there is no such file.

        Raises:
            ModelError: the file does not contain a JSON object.
        """
        return read_json(self.path / name)


def resolve_checkpoint(
    model: str, revision: str | None = None, *, with_weights: bool = True
) -> Checkpoint:
    """Find a model by directory or hub id, and download what is missing.

    Without network, the hub's local cache is used as it is.

    Args:
        model: directory, or hub id such as "Qwen/Qwen3-0.6B".
        revision: hub branch, tag or commit; None is its main branch. Not for directories.
        with_weights: False downloads and checks only configuration and tokenizer.

    Raises:
        ConfigError: neither a directory nor a model on the hub; or the hub cannot be reached and
            its cache does not hold the model.
        ModelError: what is there cannot be served; says what it is.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ConfigError(
                f"revision {revision!r} is for hub models, but {model} is a directory"
            )
        return _local_checkpoint(path.resolve(), with_weights)
    if path.exists():
        refuse_unless_served(recognise(path))
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ConfigError(f"there is no directory {model}{meant_model(model)}")
    from pdserve.model_files.hub import download  # slow to import, and only hub models need it

    files = _SMALL_FILES + (_WEIGHT_FILES if with_weights else [])
    snapshot = download(model, revision, files)
    _check_files(snapshot, with_weights)
    return Checkpoint(path=snapshot, model_id=model, revision=snapshot.name)


def weight_files(directory: Path) -> list[Path]:
    """See Checkpoint.weight_files."""
    index = read_json(directory / INDEX_FILE)
    if index is None:
        if (directory / SINGLE_FILE).is_file():
            return [directory / SINGLE_FILE]
        raise ModelError(f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{directory / INDEX_FILE} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{directory / INDEX_FILE} names a file outside its directory: {name}")
        if not (directory / name).is_file():
            raise ModelError(f"{directory / INDEX_FILE} names {name}, which does not exist")
    return [directory / name for name in names]


def read_json(file: Path) -> dict[str, Any] | None:
    """See Checkpoint.read_json."""
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        refuse_pointer(file)
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} must hold a JSON object, not a {type(content).__name__}")
    return content


# ---- directories ---------------------------------------------------------------------------------


def _local_checkpoint(directory: Path, with_weights: bool) -> Checkpoint:
    _check_files(directory, with_weights)
    if directory.parent.name == "snapshots" and directory.parent.parent.name.startswith("models--"):
        # A path into the hub's cache is that hub model, so it has the same identity on every node.
        model_id = directory.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
        return Checkpoint(path=directory, model_id=model_id, revision=directory.name)
    files = weight_files(directory) if with_weights else []
    return Checkpoint(
        path=directory, model_id=directory.name, revision=_content_revision(directory, files)
    )


def _check_files(directory: Path, with_weights: bool) -> None:
    refuse_unless_served(recognise(directory, with_weights=with_weights))
    if with_weights:
        weight_files(directory)


def _content_revision(directory: Path, files: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in [(directory / "config.json").read_bytes(), *map(_weight_file_digest, files)]:
        digest.update(hashlib.blake2b(part).digest())
    return digest.hexdigest()


def _weight_file_digest(file: Path) -> bytes:
    """Hash of a safetensors file's name, size and header, and of some bytes of each tensor."""
    refuse_pointer(file)
    size = file.stat().st_size
    digest = hashlib.blake2b(f"{file.name}\0{size}\0".encode())
    with file.open("rb") as stream:
        prefix = stream.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if header_bytes > size - 8:
            raise ModelError(f"{file} is damaged: it is shorter than its header says")
        header = stream.read(header_bytes)
        digest.update(header)
        for start, end in _tensor_spans(file, header):
            stream.seek(8 + header_bytes + max(start, (start + end - _SAMPLE_BYTES) // 2))
            digest.update(stream.read(min(_SAMPLE_BYTES, end - start)))
    return digest.digest()


def _tensor_spans(file: Path, header: bytes) -> list[tuple[int, int]]:
    """Start and end of each tensor's bytes, counted from the end of the header."""
    try:
        entries = json.loads(header)
        spans = [e["data_offsets"] for name, e in entries.items() if name != "__metadata__"]
        return sorted((int(start), int(end)) for start, end in spans)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{file} is damaged: its header is not a safetensors header") from error
