"""Finds a model's files, here or on the Hugging Face hub, and identifies their content.

No torch here: the coordinator resolves the same checkpoint for its tokenizer.

Two nodes exchange KV only if their `revision` is the same (it is part of the KV fingerprint). For a
hub model it is the commit. Else it is a hash of config.json and, for every weight file, its name,
size, header and a few bytes of each tensor: fine-tunes of one model differ only in these bytes, and
reading the files in full would double the time to start.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pdserve.model_files.gguf.config import config_of, full_bytes, served_architecture
from pdserve.model_files.gguf.model import GgufModel, open_gguf, part_paths, split_pattern
from pdserve.model_files.gguf.tokenizer import end_ids
from pdserve.model_files.git_lfs import refuse_pointer
from pdserve.model_files.identity import content_revision
from pdserve.model_files.objects.opening import is_object_url
from pdserve.model_files.recognise import recognise
from pdserve.model_files.refusal import is_page_of_hub, meant_model, refuse_unless_served
from pdserve.shared.errors import ConfigError, ModelError

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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Config, weights and tokenizer, and the model's identity."""

    path: Path  # a directory; or a GGUF file, the first if there are several
    model_id: str  # hub id, or the name of directory or file
    revision: str  # hub commit, or a hash of the content

    @property
    def gguf(self) -> GgufModel | None:
        """The model in a GGUF file; None: it is a directory. Raises ModelError."""
        return None if self.path.is_dir() else open_gguf(self.path)

    def weight_files(self) -> list[Path]:
        """The files with the model's weights, sorted by name.

        Raises:
            ModelError: there are none, or one that others name is missing.
        """
        return weight_files(self.path) if self.path.is_dir() else part_paths(self.path)

    def weight_bytes(self) -> int:
        """Size of its weights: of GGUF files, once they are plain numbers."""
        if (model := self.gguf) is not None:
            return full_bytes(model)
        return sum(file.stat().st_size for file in self.weight_files())

    def config(self) -> dict[str, Any]:
        """The content of config.json, or the same of a GGUF file.

        Raises:
            ModelError: there is none, or it is damaged.
            UnknownArchitecture: of a GGUF file.
        """
        if (model := self.gguf) is not None:
            served_architecture(model)  # before its tokens: other kinds of files have none
            return config_of(model, end_ids(model))
        content = self.read_json("config.json")
        if content is None:
            raise ModelError(f"{self.path} holds no config.json")
        return content

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file of a directory; None if there is no such file.

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
        model: directory, GGUF file, hub id such as "Qwen/Qwen3-0.6B", "hub-id:FILE.gguf", or the
            address of such a directory or file: s3://, gs:// or https://.
        revision: hub branch, tag or commit; None is its main branch. Not for what is here.
        with_weights: False downloads and checks only configuration and tokenizer; they are within
            a GGUF file.

    Raises:
        ConfigError: neither a directory nor a model on the hub; or the hub cannot be reached and
            its cache does not hold the model.
        ModelError: what is there cannot be served; says what it is.
    """
    if is_object_url(model) and not is_page_of_hub(model):
        return _of_store(model, revision, with_weights)
    path = Path(model).expanduser()
    if path.exists():
        what = "directory" if path.is_dir() else "file"
        if revision is not None:
            raise ConfigError(f"revision {revision!r} is for hub models, but {model} is a {what}")
        if path.is_dir():
            return _local_checkpoint(path.resolve(), with_weights)
        refuse_unless_served(recognise(path))
        return _local_gguf(path.parent.resolve() / path.name, with_weights)
    if not is_of_hub(model):
        raise ConfigError(f"there is no directory {model}{meant_model(model)}")
    hub_id, _, file = model.partition(":")
    if file:
        return _hub_gguf(hub_id, file, revision)
    from pdserve.model_files.hub import download  # slow to import, and only hub models need it

    files = _SMALL_FILES + (_WEIGHT_FILES if with_weights else [])
    snapshot = download(model, revision, files)
    _check_files(snapshot, with_weights)
    return Checkpoint(path=snapshot, model_id=model, revision=snapshot.name)


def is_of_hub(model: str) -> bool:
    """Whether a model of the hub may be meant, if nothing here is named so."""
    name, _, file = model.partition(":")
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    return not is_path and (not file or file.endswith(".gguf")) and "://" not in model


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
    except (FileNotFoundError, NotADirectoryError):
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
    if (model_id := _of_hub(directory)) is not None:
        return Checkpoint(path=directory, model_id=model_id, revision=directory.name)
    files = weight_files(directory) if with_weights else []
    config = (directory / "config.json").read_bytes()
    return Checkpoint(
        path=directory, model_id=directory.name, revision=content_revision(config, files)
    )


def _of_hub(directory: Path) -> str | None:
    """The hub model whose snapshot in the hub's cache this is: it is the same on every node."""
    if directory.parent.name == "snapshots" and directory.parent.parent.name.startswith("models--"):
        return directory.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    return None


# ---- GGUF ----------------------------------------------------------------------------------------


def _local_gguf(path: Path, with_weights: bool) -> Checkpoint:
    files = part_paths(path)
    first = files[0]
    for folder in first.parents:
        if (hub_id := _of_hub(folder)) is not None:
            return Checkpoint(first, f"{hub_id}:{first.relative_to(folder)}", folder.name)
    revision = content_revision(b"", files if with_weights else [])
    return Checkpoint(first, first.name.removesuffix(".gguf"), revision)


def _hub_gguf(hub_id: str, file: str, revision: str | None) -> Checkpoint:
    from pdserve.model_files.hub import download  # as above

    snapshot = download(hub_id, revision, [split_pattern(file)])
    if not (snapshot / file).is_file():
        raise ConfigError(f"{hub_id} has no {file}, on the hub or in its cache on this machine")
    return _local_gguf(snapshot / file, with_weights=True)


# ---- object stores -------------------------------------------------------------------------------


def _of_store(url: str, revision: str | None, with_weights: bool) -> Checkpoint:
    from pdserve.model_files.objects.snapshot import snapshot

    if revision is not None:
        raise ConfigError(
            f"revision {revision!r} is for hub models: hold {url} by its digest (pdserve models)"
        )
    folder, _, file = url.rstrip("/").rpartition("/")
    if file.endswith(".gguf"):
        found = snapshot(folder, [split_pattern(file)], INDEX_FILE)
        if not (found.path / file).is_file():
            raise ConfigError(f"{folder} has no {file}")
        local = _local_gguf(found.path / file, with_weights)
        return replace(local, revision=found.digest)
    files = _SMALL_FILES + (_WEIGHT_FILES if with_weights else [])
    found = snapshot(url.rstrip("/"), files, INDEX_FILE if with_weights else "")
    _check_files(found.path, with_weights)
    return Checkpoint(path=found.path, model_id=file, revision=found.digest)


def _check_files(directory: Path, with_weights: bool) -> None:
    refuse_unless_served(recognise(directory, with_weights=with_weights))
    if with_weights:
        weight_files(directory)
