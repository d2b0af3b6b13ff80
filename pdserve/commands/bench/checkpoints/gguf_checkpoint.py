"""A checkpoint as a GGUF file, for servers that read nothing else (llama.cpp).

llama.cpp's own converter knows a tokenizer by what it does to a text, and refuses one that it has
not met. Of the format (version 3) only what a bfloat16 Llama needs is written. Rows of Q and K are
permuted as that converter does, since llama.cpp rotates neighbouring elements, so it computes the
same tokens.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pdserve.model_files.checkpoint import SINGLE_FILE
from pdserve.model_files.gguf.container import ALIGNMENT, MAGIC
from pdserve.model_files.gguf.names import place_of
from pdserve.model_files.gguf.vocabulary import CONTROL, NORMAL, UNUSED
from pdserve.model_files.tokenizer import TokenizerConfig
from pdserve.shared.errors import ConfigError

_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9  # types of values
_TENSOR_F32, _TENSOR_BF16 = 0, 30
_FILE_TYPE_BF16 = 32

Tensor = tuple[str, NDArray[Any]]  # name in GGUF, values: bfloat16 as uint16, or float32


def write_gguf(checkpoint: Path, file: Path) -> None:
    """Write a checkpoint of one safetensors file in bfloat16 as `file`, complete or not at all.

    Raises:
        ConfigError: the model is no Llama.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ConfigError(f"{checkpoint}: only Llama can be GGUF here, not {config['model_type']}")
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    named = TokenizerConfig.load(checkpoint)
    values = _model_values(config) + _tokenizer_values(tokenizer, config, named)
    tensors = list(_tensors(checkpoint / SINGLE_FILE, config))
    partial = file.with_suffix(".partial")
    with partial.open("wb") as stream:
        stream.write(MAGIC + struct.pack("<IQQ", 3, len(tensors), len(values)))
        for value in values:
            stream.write(value)
        _write_tensors(stream, tensors)
    partial.rename(file)


def _model_values(config: dict[str, Any]) -> list[bytes]:
    counts = {
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.value_length": config["head_dim"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.vocab_size": config["vocab_size"],
        "general.file_type": _FILE_TYPE_BF16,
        "general.alignment": ALIGNMENT,
    }
    numbers = {
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_theta"],
    }
    return [
        _value("general.architecture", _STRING, _text("llama")),
        *(_value(name, _U32, struct.pack("<I", count)) for name, count in counts.items()),
        *(_value(name, _F32, struct.pack("<f", number)) for name, number in numbers.items()),
    ]


def _tokenizer_values(
    tokenizer: dict[str, Any], config: dict[str, Any], named: TokenizerConfig
) -> list[bytes]:
    """Return the vocabulary of a byte-level tokenizer; rows without a token are unused."""
    vocab: dict[str, int] = dict(tokenizer["model"]["vocab"])
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    by_id = {token_id: text for text, token_id in (vocab | special).items()}
    ids = range(config["vocab_size"])
    kinds = [UNUSED if i not in by_id else CONTROL if by_id[i] in special else NORMAL for i in ids]
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    eos = config["eos_token_id"]
    eos_id = eos[0] if isinstance(eos, list) else eos
    values = [
        _value("tokenizer.ggml.model", _STRING, _text("gpt2")),
        _value("tokenizer.ggml.pre", _STRING, _text(_pre_tokenizer(tokenizer))),
        _value("tokenizer.ggml.tokens", _ARRAY, _texts([by_id.get(i, f"[{i}]") for i in ids])),
        _value("tokenizer.ggml.token_type", _ARRAY, _integers(kinds)),
        _value("tokenizer.ggml.merges", _ARRAY, _texts(merges)),
        _value("tokenizer.ggml.eos_token_id", _U32, struct.pack("<I", eos_id)),
    ]
    bos = named.named_special_tokens.get("bos_token")
    if bos is not None and bos in special:
        is_added = bos in json.dumps(tokenizer["post_processor"])
        values.append(_value("tokenizer.ggml.bos_token_id", _U32, struct.pack("<I", special[bos])))
        values.append(_value("tokenizer.ggml.add_bos_token", _BOOL, struct.pack("<?", is_added)))
    if isinstance(template := named.values.get("chat_template"), str):
        values.append(_value("tokenizer.chat_template", _STRING, _text(template)))
    return values


def _pre_tokenizer(tokenizer: dict[str, Any]) -> str:
    """The name by which it is known how words are divided."""
    parts = (tokenizer["pre_tokenizer"] or {}).get("pretokenizers", [])
    splits_digits = any(part.get("pattern") == {"Regex": r"\p{N}"} for part in parts)
    return "smollm" if splits_digits else "gpt-2"


def _tensors(file: Path, config: dict[str, Any]) -> Iterator[Tensor]:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    data = np.memmap(file, np.uint8, "r", offset=8 + length)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ConfigError(f"{file}: {name} is {entry['dtype']}, but must be BF16")
        start, end = entry["data_offsets"]
        values = data[start:end].view(np.uint16).reshape(entry["shape"])
        place = place_of(name)
        if values.ndim == 1:  # a norm
            widened = (values.astype(np.uint32) << 16).view(np.float32)
            yield place.name, widened
        else:
            num_heads = heads.get(place.part)
            yield place.name, _neighbours(values, num_heads) if num_heads else values


def _neighbours(matrix: NDArray[np.uint16], num_heads: int) -> NDArray[np.uint16]:
    """Return [rows, columns] with the two halves of each head's rows interleaved."""
    halves = matrix.reshape(num_heads, 2, -1, matrix.shape[1])
    return halves.swapaxes(1, 2).reshape(matrix.shape)


def _write_tensors(stream: BinaryIO, tensors: Sequence[Tensor]) -> None:
    offset = 0
    for name, values in tensors:
        sizes = values.shape[::-1]  # the fastest first
        kind = _TENSOR_F32 if values.dtype == np.float32 else _TENSOR_BF16
        place = struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
        stream.write(_text(name) + place)
        offset += _padded(values.nbytes)
    for _, values in tensors:
        stream.write(bytes(_padded(stream.tell()) - stream.tell()))
        stream.write(np.ascontiguousarray(values).tobytes())


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _value(name: str, kind: int, encoded: bytes) -> bytes:
    return _text(name) + struct.pack("<I", kind) + encoded


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _integers(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<IQ{len(numbers)}i", _I32, len(numbers), *numbers)


def _texts(texts: Sequence[str]) -> bytes:
    return struct.pack("<IQ", _STRING, len(texts)) + b"".join(map(_text, texts))
