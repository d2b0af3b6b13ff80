"""Checkpoints with random weights, of sizes at which prefill and decode matter on a CPU core.

The bundled demo model is so small that a step is mostly overhead, and takes at most 2048 tokens.
The smallest of these is a Llama with 14 million weights that takes 8192. On one Zen 4 core a prompt
of 4096 tokens takes 1.2 s, and a decode step 4 ms alone, 6 ms for eight requests. Answers are
meaningless, but every token is plain text, so that a client sees each token when it is sampled:
special tokens, parts of characters and unused ids have zero rows in the output matrix, and the
largest of many random logits is above zero.

Written with numpy, tensor by tensor, 1.2 GB in a few seconds, without torch. transformers, vLLM and
llama.cpp's converter can read the files too.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import shutil
import struct
import tempfile
from pathlib import Path
from statistics import NormalDist
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from pdserve.commands.bench.checkpoints.shapes import SHAPES, Shape
from pdserve.demo_model import CHECKPOINT_PATH
from pdserve.engine.models.config import ModelConfig, parse_model_config
from pdserve.engine.models.json_fields import JsonFields
from pdserve.model_files.checkpoint import SINGLE_FILE
from pdserve.shared.errors import ConfigError

_SMALLEST: Final = SHAPES["demo-14m"]
_FORMAT = 1  # version of what is written for a shape; a new one makes a new checkpoint
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_SPACE = "Ġ"  # a space in byte-level vocabularies
_PRINTABLE = frozenset(map(chr, range(0x21, 0x7F)))
_LEVELS = 1 << 12  # number of distinct values of a matrix, all equally likely
_PIECE = 1 << 22  # weights drawn and written at a time
_HEADS: Final = ("attention", "key_value")

Weights = NDArray[np.uint16]  # bfloat16, which numpy does not have
Plan = dict[str, tuple[int, ...]]  # tensor name |-> shape


def config_of(shape: Shape) -> dict[str, Any]:
    """Return the config.json of a shape."""
    demo: dict[str, Any] = json.loads((CHECKPOINT_PATH / "config.json").read_text())
    return demo | {"tie_word_embeddings": False} | shape


def write_random_checkpoint(folder: Path, *, seed: int = 0, shape: Shape = _SMALLEST) -> Path:
    """Write config, weights in bfloat16, and the demo model's tokenizer; deterministic for a seed.

    Args:
        folder: created if need be.
        seed: of the weights.
        shape: fields of config.json that differ from the demo model's.

    Returns:
        `folder`.

    Raises:
        ConfigError: the weights do not fit on the disk.
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    num_bytes = 2 * sum(map(math.prod, tensor_shapes(config_of(shape)).values()))
    free_bytes = shutil.disk_usage(folder).free
    if num_bytes > free_bytes:
        raise ConfigError(
            f"random weights of this shape are {num_bytes / 1e9:.1f} GB, and there is room for "
            f"{free_bytes / 1e9:.1f} GB in {folder.parent}: take a smaller shape"
        )
    for name in _TOKENIZER_FILES:
        shutil.copyfile(CHECKPOINT_PATH / name, folder / name)
    config = config_of(shape)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["model_max_length"] = config["max_position_embeddings"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    _write_safetensors(folder / SINGLE_FILE, config, plain_ids(tokenizer), seed)
    return folder


def kept_checkpoint(folder: Path, name: str) -> Path:
    """Return the checkpoint of a named shape in a cache folder; written there the first time.

    It appears complete or not at all, even if another process writes the same checkpoint.
    """
    shape = SHAPES[name]
    digest = hashlib.blake2b(json.dumps([_FORMAT, shape]).encode(), digest_size=4).hexdigest()
    kept = folder / f"{name}-{digest}"
    if not kept.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder) as temporary:
            written = write_random_checkpoint(Path(temporary) / "checkpoint", shape=shape)
            try:
                written.rename(kept)
            except OSError:
                if not kept.is_dir():  # no other process was faster
                    raise
    return kept


def plain_ids(tokenizer: dict[str, Any]) -> list[int]:
    """Ids of a byte-level tokenizer.json that are whole printable ASCII text, ascending."""
    special = {token["id"] for token in tokenizer["added_tokens"]}
    return sorted(
        token_id
        for text, token_id in tokenizer["model"]["vocab"].items()
        if token_id not in special and all(c == _SPACE or c in _PRINTABLE for c in text)
    )


def tensor_shapes(config: dict[str, Any]) -> Plan:
    """Return the shape of every tensor, in the order of the file."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    model = parse_model_config(JsonFields(config, "config.json"))
    with_kv = _attention_shapes(config, model)
    with_kv |= {f"{norm.tensor}.weight": (head_dim,) for norm in model.norms if norm.is_of_heads}
    norms = {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    shapes: Plan = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for index in range(config["num_hidden_layers"]):
        mixer = with_kv if index in model.kv_layers else _state_shapes(model)
        own = norms | mixer | _mlp_shapes(model, index)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in own.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _attention_shapes(config: dict[str, Any], model: ModelConfig) -> Plan:
    """Return the shapes of a layer's attention, names without the layer's."""
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], model.latent
    if latent is not None:
        assert latent.query_rank is None, "no shape has one"
        of_head = latent.nope_dim + latent.value_dim
        return {
            "self_attn.q_proj.weight": (heads * latent.query_dim, hidden),
            "self_attn.kv_a_proj_with_mqa.weight": (latent.row_dim, hidden),
            "self_attn.kv_a_layernorm.weight": (latent.rank,),
            "self_attn.kv_b_proj.weight": (heads * of_head, latent.rank),
            "self_attn.o_proj.weight": (hidden, heads * latent.value_dim),
        }
    q_rows, kv_rows = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in _HEADS)
    return {
        "self_attn.q_proj.weight": (q_rows * (1 + model.gates_attention), hidden),
        "self_attn.k_proj.weight": (kv_rows, hidden),
        "self_attn.v_proj.weight": (kv_rows, hidden),
        "self_attn.o_proj.weight": (hidden, q_rows),
    }


def _state_shapes(model: ModelConfig) -> Plan:
    """Return the shapes of what mixes tokens in a layer with a state, names likewise."""
    shape, hidden = model.recurrent, model.hidden_size
    assert shape is not None, "it has such layers"
    return {
        "linear_attn.in_proj_qkvz.weight": (shape.channels + shape.values_width, hidden),
        "linear_attn.in_proj_ba.weight": (2 * shape.num_values, hidden),
        "linear_attn.conv1d.weight": (shape.channels, 1, shape.kernel),
        "linear_attn.A_log": (shape.num_values,),
        "linear_attn.dt_bias": (shape.num_values,),
        "linear_attn.norm.weight": (shape.value_dim,),
        "linear_attn.out_proj.weight": (hidden, shape.values_width),
    }


def _mlp_shapes(model: ModelConfig, layer: int) -> Plan:
    """Return the shapes of a layer's MLP or of its experts, names without the layer's."""
    hidden, experts = model.hidden_size, model.experts_of(layer)
    if experts is None:
        matrices = [("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")]
        inner, shapes = model.intermediate_size, Plan()
    else:
        matrices = [experts.names.expert(number) for number in range(experts.num_experts)]
        inner = experts.intermediate_size
        shapes = {f"{experts.names.router()}.weight": (experts.num_experts, hidden)}
    for gate, up, down in matrices:
        shapes |= {f"{gate}.weight": (inner, hidden), f"{up}.weight": (inner, hidden)}
        shapes[f"{down}.weight"] = (hidden, inner)
    return shapes


def _write_safetensors(file: Path, config: dict[str, Any], spoken: list[int], seed: int) -> None:
    """Write the file: a length, a JSON header and the data.

    The format's Python package is not used, since it needs a bfloat16 type.
    """
    rng = np.random.default_rng(seed)
    shapes = tensor_shapes(config)
    output = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            if len(shape) == 1:  # a norm
                stream.write(_to_bfloat16(np.ones(shape, np.float32)).tobytes())
            elif name == output:
                _write_output(stream, rng, shape, spoken)
            else:
                _write_matrix(stream, rng, math.prod(shape[:-1]), shape[-1])


def _write_matrix(stream: BinaryIO, rng: np.random.Generator, num_out: int, num_in: int) -> None:
    """Write random weights, scaled so that activations neither vanish nor grow."""
    values = _levels(num_in)
    left = num_out * num_in
    while left:
        count = min(left, _PIECE)
        # Random bits are cheaper than normal numbers, which are looked up in a table.
        picks = np.frombuffer(rng.bytes(2 * count), np.uint16) & (_LEVELS - 1)
        stream.write(values[picks].tobytes())
        left -= count


def _write_output(
    stream: BinaryIO, rng: np.random.Generator, shape: tuple[int, ...], spoken: list[int]
) -> None:
    """Write the output matrix: zeros except for the rows of tokens that may be sampled."""
    hidden = shape[1]
    matrix = np.zeros(shape, np.uint16)
    picks = rng.integers(0, _LEVELS, (len(spoken), hidden), np.uint16)
    matrix[spoken] = _levels(hidden)[picks]
    matrix.tofile(stream)


@functools.cache
def _levels(num_in: int) -> Weights:
    """Return [_LEVELS]: equally likely values of a normal distribution of variance 1 / num_in."""
    normal = NormalDist(0.0, num_in**-0.5)
    steps = [normal.inv_cdf((level + 0.5) / _LEVELS) for level in range(_LEVELS)]
    return _to_bfloat16(np.array(steps, np.float32))


def _to_bfloat16(values: NDArray[np.float32]) -> Weights:
    """Return the upper halves of the float32s, rounded."""
    return ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
