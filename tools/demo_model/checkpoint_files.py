"""The model's configuration; writes its weights and settings to a folder."""

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from tools.demo_model.tokenizer import BOS, END, END_OF_TEXT, save_tokenizer, token_id

ROPE_THETA: Final = 10000.0
MAX_POSITIONS: Final = 2048

SHAPE: Final[dict[str, int]] = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""1.97 million parameters with a vocabulary of 2048: 3.9 MB in bfloat16."""

DRAFT_SHAPE: Final[dict[str, int]] = {
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
"""0.32 million parameters, two thirds of them the embedding; two layers, so that it can copy."""


def model_config(tokenizer: Tokenizer, shape: dict[str, int]) -> dict[str, Any]:
    """Return the contents of config.json.

    The rope base occurs twice: at the top, where transformers 4 and most servers look for it, and
    under `rope_parameters`, where transformers 5 does. The same holds for the dtype.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        **shape,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": ROPE_THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": token_id(tokenizer, BOS),
        "eos_token_id": _stop_ids(tokenizer),
        "pad_token_id": token_id(tokenizer, END_OF_TEXT),
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "use_cache": True,
    }


def _stop_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that end an answer and a plain text."""
    return [token_id(tokenizer, END), token_id(tokenizer, END_OF_TEXT)]


def new_model(tokenizer: Tokenizer, shape: dict[str, int]) -> LlamaForCausalLM:
    """Build the model with random weights in float32, the dtype it is trained in."""
    settings = model_config(tokenizer, shape) | {"dtype": "float32"}
    del settings["torch_dtype"], settings["architectures"], settings["model_type"]
    return LlamaForCausalLM(LlamaConfig(**settings))


def round_to_bfloat16(model: LlamaForCausalLM) -> None:
    """Round the weights in place to the values that the checkpoint will hold."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))


def save_checkpoint(
    model: LlamaForCausalLM, tokenizer: Tokenizer, shape: dict[str, int], folder: Path
) -> None:
    """Write everything that a server needs to load the model."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = model_config(tokenizer, shape)
    generation = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
        "do_sample": False,
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", generation)
    save_tokenizer(tokenizer, folder, MAX_POSITIONS)


def write_json(path: Path, contents: dict[str, Any]) -> None:
    """Write one settings file, readable and with a final newline."""
    path.write_text(json.dumps(contents, indent=2, ensure_ascii=False) + "\n")
