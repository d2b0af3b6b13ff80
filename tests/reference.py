"""transformers as the oracle."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM


class Reference:
    """transformers on a checkpoint."""

    def __init__(
        self, path: Path, dtype: torch.dtype = torch.float32, attention: str = "eager"
    ) -> None:
        """`attention` is one of its implementations; "eager" is the plain one."""
        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attention
        ).eval()

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> Tensor:
        """[num_tokens, vocab_size] float32."""
        return self._model(torch.tensor([token_ids])).logits[0].float()

    @torch.inference_mode()
    def states(self, token_ids: list[int]) -> Tensor:
        """[num_tokens, hidden_size] float32, behind the final norm."""
        found = self._model(torch.tensor([token_ids]), output_hidden_states=True)
        return found.hidden_states[-1][0].float()

    def logprobs(self, token_ids: list[int]) -> Tensor:
        """[num_tokens - 1, vocab_size], of each token but the first."""
        return self.logits(token_ids)[:-1].log_softmax(dim=-1)

    @torch.inference_mode()
    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Output of generate(), not stopping at eos."""
        self._model.generation_config.eos_token_id = None
        output = self._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return output[0, len(prompt) :].tolist()

    def is_greedy(self, prompt: list[int], output: list[int]) -> bool:
        """Whether each token of a long output is the likeliest one after those before it."""
        logits = self.logits(prompt + output[:-1])[len(prompt) - 1 :]
        return logits.argmax(dim=-1).tolist() == output
