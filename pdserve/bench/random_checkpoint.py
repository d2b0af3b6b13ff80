"""A checkpoint with random weights, of a size at which prefill and decode matter on a CPU core.

The bundled demo model is so small that a step is mostly overhead, and it takes 2048 tokens at most.
This one is a Llama of 14 million that takes 8192. On one Zen 4 core a prompt of 4096 tokens takes
1.2 s and a decode step 4 ms alone, 6 ms for eight requests. Its answers mean nothing, but every
token of them is plain text, so that a client sees each token when it is there: tokens that are
special, or a part of a character, have zeros for their rows of the output matrix, and the largest
of many random logits is above zero.

Written with numpy; no torch here.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pdserve.checkpoint import SINGLE_FILE
from pdserve.demo_model import CHECKPOINT_PATH

SHAPE: Final[dict[str, int]] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
MAX_POSITIONS: Final = 8192

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_SPACE = "Ġ"  # as byte-level vocabularies write it

Weights = NDArray[np.uint16]  # bfloat16, which numpy does not have


def write_random_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    shape: dict[str, int] = SHAPE,
    max_positions: int = MAX_POSITIONS,
) -> Path:
    """Write config, weights in bfloat16, and the demo model's tokenizer; the same for a seed.

    Args:
        folder: created if need be.
        seed: of the weights.
        shape: what it has in common with `SHAPE`: fields of config.json.
        max_positions: tokens of prompt and output together.

    Returns:
        `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER_FILES:
        shutil.copyfile(CHECKPOINT_PATH / name, folder / name)
    demo = json.loads((CHECKPOINT_PATH / "config.json").read_text())
    config = demo | shape | {"max_position_embeddings": max_positions, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["model_max_length"] = max_positions
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    _write_safetensors(folder / SINGLE_FILE, dict(_weights(config, plain_ids(tokenizer), seed)))
    return folder


def plain_ids(tokenizer: dict[str, Any]) -> list[int]:
    """Ids of a byte-level tokenizer.json that are whole printable ASCII text, ascending."""
    special = {token["id"] for token in tokenizer["added_tokens"]}
    return sorted(
        token_id
        for text, token_id in tokenizer["model"]["vocab"].items()
        if token_id not in special and all(c == _SPACE or c in _PRINTABLE for c in text)
    )


_PRINTABLE = frozenset(map(chr, range(0x21, 0x7F)))


def _weights(config: dict[str, Any], spoken: list[int], seed: int) -> Iterator[tuple[str, Weights]]:
    """Name |-> weights, of a scale at which activations neither vanish nor grow."""
    rng = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]

    def matrix(num_out: int, num_in: int) -> Weights:
        return _to_bfloat16(rng.standard_normal((num_out, num_in), np.float32) * num_in**-0.5)

    def norm() -> Weights:
        return _to_bfloat16(np.ones(hidden, np.float32))

    yield "model.embed_tokens.weight", matrix(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", norm()
        yield prefix + "self_attn.q_proj.weight", matrix(q_rows, hidden)
        yield prefix + "self_attn.k_proj.weight", matrix(kv_rows, hidden)
        yield prefix + "self_attn.v_proj.weight", matrix(kv_rows, hidden)
        yield prefix + "self_attn.o_proj.weight", matrix(hidden, q_rows)
        yield prefix + "post_attention_layernorm.weight", norm()
        yield prefix + "mlp.gate_proj.weight", matrix(inner, hidden)
        yield prefix + "mlp.up_proj.weight", matrix(inner, hidden)
        yield prefix + "mlp.down_proj.weight", matrix(hidden, inner)
    yield "model.norm.weight", norm()
    head = np.zeros((config["vocab_size"], hidden), np.uint16)
    head[spoken] = matrix(len(spoken), hidden)
    yield "lm_head.weight", head


def _to_bfloat16(values: NDArray[np.float32]) -> Weights:
    """The upper halves of the float32s, rounded."""
    return ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def _write_safetensors(file: Path, weights: dict[str, Weights]) -> None:
    """The format is a length, a JSON header and the bytes; its Python package needs a bfloat16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in weights.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for array in weights.values():
            stream.write(array.tobytes())
