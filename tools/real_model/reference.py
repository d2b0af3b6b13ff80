"""transformers in float32 on the file's weights, which the `gguf` package decodes.

Nothing of pdserve is used: names, norms and shapes are written down once more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from tools.real_model.comparison import Expected

_PARTS: Final = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ENDS: Final = {"token_embd.weight": "embed_tokens", "output_norm.weight": "norm"}
_ROWS: Final = 128  # whose logits are there at a time: the vocabulary is large


class Gemma:
    """Gemma 3 of a GGUF file."""

    def __init__(self, file: Path) -> None:
        reader = GGUFReader(file)
        self._model = Gemma3ForCausalLM.from_pretrained(
            None,
            config=_config(reader),
            state_dict=dict(_weights(reader)),
            dtype=torch.float32,
            attn_implementation="eager",
        )

    @torch.inference_mode()
    def expected(self, prompt: Sequence[int], token_ids: Sequence[int]) -> list[Expected]:
        """Of each token behind the prompt."""
        every = torch.tensor([*prompt, *token_ids])
        states = self._model.model(every[None, :-1]).last_hidden_state[0, len(prompt) - 1 :]
        found: list[Expected] = []
        for first in range(0, len(states), _ROWS):
            logprobs = self._model.lm_head(states[first : first + _ROWS]).log_softmax(-1)
            chosen = every[len(prompt) + first :][: len(logprobs)]
            found += _rows(logprobs, chosen)
        return found


def _rows(logprobs: Tensor, chosen: Tensor) -> Iterator[Expected]:
    """`logprobs` [rows, vocabulary], `chosen` [rows]."""
    best = logprobs.topk(2)
    for row, token_id in enumerate(chosen.tolist()):
        margin = best.values[row, 0] - best.values[row, 1]
        yield Expected(int(best.indices[row, 0]), margin.item(), logprobs[row, token_id].item())


def _config(reader: GGUFReader) -> Gemma3TextConfig:
    def value(name: str) -> Any:
        return reader.fields[f"gemma3.{name}"].contents()

    return Gemma3TextConfig(
        vocab_size=int(_tensor(reader, "token_embd.weight").shape[1]),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        head_dim=value("attention.key_length"),
        sliding_window=value("attention.sliding_window"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=value("context_length"),
    )


def _tensor(reader: GGUFReader, name: str) -> Any:
    return next(tensor for tensor in reader.tensors if tensor.name == name)


def _weights(reader: GGUFReader) -> Iterator[tuple[str, Tensor]]:
    """Name in transformers, float32."""
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        name = _name(tensor.name)
        yield name, values - 1 if name.endswith("norm.weight") else values  # stored as 1 + w


def _name(name: str) -> str:
    if name in _ENDS:
        return f"model.{_ENDS[name]}.weight"
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if found is None:
        raise KeyError(name)
    return f"model.layers.{found[1]}.{_PARTS[found[2]]}.weight"
