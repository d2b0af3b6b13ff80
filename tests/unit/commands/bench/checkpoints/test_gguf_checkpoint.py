"""Checkpoints as GGUF files: every tensor is where the header says, and says the same."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from pdserve.commands.bench.checkpoints.gguf_checkpoint import write_gguf
from pdserve.commands.bench.checkpoints.random_checkpoint import (
    tensor_shapes,
    write_random_checkpoint,
)
from pdserve.model_files.checkpoint import SINGLE_FILE
from pdserve.shared.errors import ConfigError

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 2050,  # two more than the tokenizer has
}
FORMATS = {4: "I", 5: "i", 6: "f", 7: "?"}


def read_text(stream: BinaryIO) -> str:
    return stream.read(struct.unpack("<Q", stream.read(8))[0]).decode()


def read_value(stream: BinaryIO, kind: int) -> Any:
    if kind == 8:
        return read_text(stream)
    if kind == 9:
        inner, count = struct.unpack("<IQ", stream.read(12))
        return [read_value(stream, inner) for _ in range(count)]
    form = struct.Struct("<" + FORMATS[kind])
    return form.unpack(stream.read(form.size))[0]


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with file.open("rb") as stream:
        assert stream.read(4) == b"GGUF"
        version, num_tensors, num_values = struct.unpack("<IQQ", stream.read(20))
        assert version == 3
        values = {
            read_text(stream): read_value(stream, struct.unpack("<I", stream.read(4))[0])
            for _ in range(num_values)
        }
        entries = []
        for _ in range(num_tensors):
            name = read_text(stream)
            (num_sizes,) = struct.unpack("<I", stream.read(4))
            sizes = struct.unpack(f"<{num_sizes}Q", stream.read(8 * num_sizes))
            entries.append((name, sizes[::-1], *struct.unpack("<IQ", stream.read(12))))
        begin = -(-stream.tell() // 32) * 32
    tensors = {
        name: np.memmap(file, {0: np.float32, 30: np.uint16}[kind], "r", begin + offset, shape)
        for name, shape, kind, offset in entries
    }
    return values, tensors


def safetensors(file: Path) -> dict[str, np.ndarray]:
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    body = np.frombuffer(data, np.uint8, offset=8 + length)
    return {
        name: body[slice(*entry["data_offsets"])].view(np.uint16).reshape(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def test_a_gguf_file_says_what_the_checkpoint_says(tmp_path: Path) -> None:
    checkpoint = write_random_checkpoint(tmp_path / "checkpoint", shape=SHAPE)
    write_gguf(checkpoint, tmp_path / "it.gguf")
    values, tensors = read_gguf(tmp_path / "it.gguf")
    assert values["llama.attention.head_count_kv"] == 2
    assert len(values["tokenizer.ggml.tokens"]) == len(values["tokenizer.ggml.token_type"]) == 2050
    assert values["tokenizer.ggml.token_type"][-3:] == [1, 5, 5]
    ours = safetensors(checkpoint / SINGLE_FILE)
    config = json.loads((checkpoint / "config.json").read_text())
    assert len(tensors) == len(ours) == len(tensor_shapes(config))
    assert (tensors["output.weight"] == ours["lm_head.weight"]).all()
    assert (tensors["blk.1.ffn_down.weight"] == ours["model.layers.1.mlp.down_proj.weight"]).all()
    assert (tensors["blk.0.attn_norm.weight"] == 1.0).all()
    for name, num_heads in (("q", 4), ("k", 2)):
        theirs = tensors[f"blk.1.attn_{name}.weight"].reshape(num_heads, 8, 32)
        heads = ours[f"model.layers.1.self_attn.{name}_proj.weight"].reshape(num_heads, 8, 32)
        assert (theirs[:, 0::2] == heads[:, :4]).all(), "the first halves of pairs"
        assert (theirs[:, 1::2] == heads[:, 4:]).all()


def test_another_family_is_refused(tmp_path: Path) -> None:
    shape = SHAPE | {"model_type": "qwen3", "tie_word_embeddings": True}
    checkpoint = write_random_checkpoint(tmp_path / "checkpoint", shape=shape)
    with pytest.raises(ConfigError, match="only Llama can be GGUF here, not qwen3"):
        write_gguf(checkpoint, tmp_path / "it.gguf")
    assert not (tmp_path / "it.gguf").exists()
