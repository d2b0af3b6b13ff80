"""transformers as the oracle."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.unit.engine_model.harness import Node, make_prompt, make_request


class Reference:
    """transformers on a checkpoint, with plain attention."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[num_tokens, vocab_size] float32."""
        return self._model(torch.tensor([token_ids])).logits[0].float()

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


def assert_matches(path: Path, num_prompt: int = 200, num_output: int = 12) -> None:
    """Logits within 1e-4 and equal greedy tokens, for one prompt."""
    reference, node = Reference(path), Node.load(path)
    prompt = make_prompt(num_prompt)
    expected = reference.logits(prompt)
    torch.testing.assert_close(node.logits(prompt), expected, atol=1e-4, rtol=1e-4)
    assert expected.std() > 0.5, "a flat distribution would compare nothing"
    request = make_request(prompt)
    node.generate([request], num_output)
    output = reference.greedy(prompt, num_output)
    assert request.output_token_ids == output
    assert len(set(output)) > num_output // 2, "nor would a sequence that repeats itself"
