"""The checkpoints that clusters serve in these tests, and what transformers makes of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.checkpoints import make_checkpoint

# With no ids beyond the tokenizer's (256 bytes, one end of turn), every token can be told from
# what the API says about it.
VOCAB_SIZE = 257
MAX_MODEL_LEN = 4096

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}

# name |-> family, what differs from a small model of it
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, GQA, head_dim 64, llama3 rope": (
        "llama",
        {"head_dim": 64, "rope_parameters": _LLAMA3_ROPE},
    ),
    "llama, MHA, head_dim 128, tied": (
        "llama",
        {"head_dim": 128, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "mistral, GQA, head_dim 64, sharded": ("mistral", {"head_dim": 64, "max_shard_size": "100KB"}),
    "qwen2, one KV head, head_dim 64, tied": (
        "qwen2",
        {"hidden_size": 256, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "qwen3, GQA, qk-norm, head_dim 128": ("qwen3", {"head_dim": 128}),
}


def make_family(path: Path, name: str) -> Path:
    """The checkpoint of that row of `FAMILIES`."""
    family, overrides = FAMILIES[name]
    overrides = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_MODEL_LEN} | overrides
    return make_checkpoint(path, family, **overrides)


def make_tiny(path: Path, max_model_len: int = MAX_MODEL_LEN) -> Path:
    """The smallest: for tests of the cluster, not of the model."""
    return make_checkpoint(
        path,
        "llama",
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=max_model_len,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
    )


def make_prompt(num_tokens: int, seed: object = 0) -> list[int]:
    """Random token ids, the same ones for the same arguments."""
    return random.Random(f"{num_tokens} {seed}").choices(range(256), k=num_tokens)


class Reference:
    """transformers on a checkpoint, in float32, in one thread."""

    def __init__(self, path: Path) -> None:
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self._model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Output of generate(), not stopping at eos."""
        output = self._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return output[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """[num_tokens - 1, vocab_size], of each token but the first."""
        return self._model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(dim=-1)

    @torch.inference_mode()
    def states(self, token_ids: list[int]) -> torch.Tensor:
        """[num_tokens, hidden_size], behind the final norm."""
        found = self._model(torch.tensor([token_ids]), output_hidden_states=True)
        return found.hidden_states[-1][0]

    @torch.inference_mode()
    def is_greedy(self, prompt: list[int], output: list[int]) -> bool:
        """Whether each token of a long output is the likeliest one after those before it."""
        logits = self._model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        return logits.argmax(dim=-1).tolist() == output
