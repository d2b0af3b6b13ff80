"""Finding a model: directories, the hub's cache without a network, and what goes wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from safetensors.torch import load_file, save_file

from pdserve.commands.bench.checkpoints.gguf_checkpoint import write_gguf
from pdserve.demo_model import CHECKPOINT_PATH
from pdserve.engine.models.config import load_model_config
from pdserve.model_files.checkpoint import Checkpoint, resolve_checkpoint
from pdserve.model_files.tokenizer import read_tokenizer
from pdserve.shared.errors import ConfigError, ModelError
from tests.checkpoints import edit_config, make_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "tiny-model", "llama")


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache of our own, with the network switched off."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return cache


def cache_model(cache: Path, model_id: str) -> Path:
    folder = cache / f"models--{model_id.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    return make_checkpoint(folder / "snapshots" / COMMIT, "llama")


def revision(path: Path) -> str:
    return resolve_checkpoint(str(path)).revision


def test_a_directory_is_named_after_itself(model: Path) -> None:
    checkpoint = resolve_checkpoint(str(model))
    assert checkpoint.path == model
    assert checkpoint.model_id == "tiny-model"
    assert [f.name for f in checkpoint.weight_files()] == ["model.safetensors"]
    assert checkpoint.read_json("absent.json") is None


def test_revision_follows_the_content(model: Path, tmp_path: Path) -> None:
    first = revision(model)
    assert revision(make_checkpoint(tmp_path / "copy" / "tiny-model", "llama")) == first
    assert revision(make_checkpoint(tmp_path / "seed", "llama", seed=1)) != first

    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1.01  # a fine-tune of one matrix
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    second = revision(model)
    assert second != first

    edit_config(model, rms_norm_eps=1e-3)
    assert revision(model) not in {first, second}


def test_shards_in_order(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", max_shard_size="100KB")
    names = [f.name for f in resolve_checkpoint(str(tmp_path)).weight_files()]
    assert len(names) > 1
    assert names == sorted(f.name for f in tmp_path.glob("*.safetensors"))


def test_a_relative_path_has_the_directorys_name(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model)
    assert resolve_checkpoint(".").model_id == "tiny-model"


def test_hub_id_from_the_cache(hub_cache: Path) -> None:
    snapshot = cache_model(hub_cache, "org/model")
    for revision_asked in (None, "main", COMMIT):
        checkpoint = resolve_checkpoint("org/model", revision_asked)
        assert checkpoint.path == snapshot
        assert (checkpoint.model_id, checkpoint.revision) == ("org/model", COMMIT)
    # The same snapshot by its path goes by the same names.
    assert resolve_checkpoint(str(snapshot)) == resolve_checkpoint("org/model")


def test_a_gguf_file_of_the_hub_has_its_commit(hub_cache: Path) -> None:
    snapshot = cache_model(hub_cache, "org/model")
    (snapshot / "q").mkdir()
    write_gguf(CHECKPOINT_PATH, snapshot / "q" / "m.gguf")
    checkpoint = resolve_checkpoint("org/model:q/m.gguf", "main")
    assert checkpoint == Checkpoint(snapshot / "q" / "m.gguf", "org/model:q/m.gguf", COMMIT)
    assert checkpoint == resolve_checkpoint(str(snapshot / "q" / "m.gguf"))
    assert checkpoint.config()["architectures"] == ["LlamaForCausalLM"]
    with pytest.raises(ConfigError, match=r"org/model has no n\.gguf, on the hub or in its cache"):
        resolve_checkpoint("org/model:n.gguf")


def test_coordinator_needs_no_weights(hub_cache: Path, model: Path) -> None:
    snapshot = cache_model(hub_cache, "org/model")
    (snapshot / "model.safetensors").unlink()
    (model / "model.safetensors").unlink()
    assert resolve_checkpoint("org/model", with_weights=False).revision == COMMIT
    assert resolve_checkpoint(str(model), with_weights=False).model_id == "tiny-model"
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        resolve_checkpoint("org/model")


@pytest.mark.parametrize("name", ["./missing", "/nowhere/model", "~/nowhere", "a/b/c"])
def test_no_such_directory(name: str) -> None:
    with pytest.raises(ConfigError, match="there is no directory"):
        resolve_checkpoint(name)


def test_not_cached_and_no_network(hub_cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"'org/absent'.*cannot be reached"):
        resolve_checkpoint("org/absent")


def test_neither_path_nor_hub_id(hub_cache: Path) -> None:
    with pytest.raises(ConfigError, match="neither a directory nor the id of a model"):
        resolve_checkpoint("bad id!")


def test_file_and_revision_of_a_directory(model: Path) -> None:
    with pytest.raises(ModelError, match=f"name its folder: {model}"):
        resolve_checkpoint(str(model / "config.json"))
    with pytest.raises(ConfigError, match="revision"):
        resolve_checkpoint(str(model), "main")


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="an empty folder"):
        resolve_checkpoint(str(tmp_path))


def test_only_bin_files(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickle format \(pytorch_model\.bin\): only safetensors"):
        resolve_checkpoint(str(model))


def test_other_safetensors_are_named(model: Path) -> None:
    (model / "model.safetensors").rename(model / "other.safetensors")
    with pytest.raises(ModelError, match=r"\(other\.safetensors\): its weights must be"):
        resolve_checkpoint(str(model))


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        ({"weight_map": {"a": "model-00001-of-00001.safetensors"}}, "does not exist"),
        ({"weight_map": {"a": "../model.safetensors"}}, "outside"),
        ({}, "no weight_map"),
        ([], "a JSON object, not a list"),
    ],
)
def test_bad_index(index: object, complaint: str, model: Path) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=complaint):
        resolve_checkpoint(str(model))


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\xff" * 64, (8).to_bytes(8, "little") + b"[1,2,3] "]
)
def test_damaged_weights_are_named(content: bytes, model: Path) -> None:
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        resolve_checkpoint(str(model))


def load_all(model: Path) -> None:
    load_model_config(resolve_checkpoint(str(model)))
    read_tokenizer(model)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_what_git_lfs_has_not_fetched_is_told_from_damage(name: str, model: Path) -> None:
    (model / name).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n"
    )
    with pytest.raises(ModelError, match=f"{name} is a pointer.*`git lfs pull`"):
        load_all(model)


def test_a_damaged_config_is_refused(model: Path) -> None:
    (model / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        resolve_checkpoint(str(model)).read_json("config.json")


def test_reading_a_config_does_not_load_torch() -> None:
    code = (
        "import sys, pdserve.model_files.checkpoint, pdserve.engine.models.config;"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
