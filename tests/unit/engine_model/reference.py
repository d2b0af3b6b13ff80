"""transformers as the oracle."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.requests import make_request
from tests.unit.engine_model.harness import DecoderKind, Node, make_prompt


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
    def states(self, token_ids: list[int]) -> torch.Tensor:
        """[num_tokens, hidden_size] float32, behind the final norm."""
        found = self._model(torch.tensor([token_ids]), output_hidden_states=True)
        return found.hidden_states[-1][0].float()

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


def assert_matches(
    path: Path, kind: DecoderKind, num_prompt: int = 200, num_output: int = 12
) -> None:
    """Equal logits, but for roundings of float32, and equal greedy tokens, for one prompt."""
    assert_node_matches(path, Node.load(path, kind), num_prompt, num_output)


def assert_node_matches(
    path: Path, node: Node, num_prompt: int = 200, num_output: int = 12
) -> None:
    """The same of a node that has loaded this checkpoint."""
    reference = Reference(path)
    prompt = make_prompt(num_prompt)
    expected = reference.logits(prompt)
    difference = (node.logits(prompt) - expected).abs()
    # Against float64, either of the two is up to 1.4e-4 off, and 1e-5 in the mean.
    assert difference.max() < 3e-4
    assert difference.mean() < 2e-5
    assert expected.std() > 0.5, "a flat distribution would compare nothing"
    request = make_request(prompt)
    node.generate([request], num_output)
    output = reference.greedy(prompt, num_output)
    assert request.output_token_ids == output
    assert len(set(output)) > num_output // 2, "nor would a sequence that repeats itself"
