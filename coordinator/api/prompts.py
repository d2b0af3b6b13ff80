"""A /v1/completions prompt in its four shapes: a text, token ids, several texts, several ids."""

from __future__ import annotations

from typing import Any

from coordinator.api.limits import check_num_chars, check_token_ids
from coordinator.text import Tokenizer
from pdserve.errors import ContextLengthExceeded, InvalidRequest

MAX_PROMPTS = 64  # in one request
Prompt = str | list[int]


async def encode_prompt(
    prompt: Prompt, tokenizer: Tokenizer, *, add_special_tokens: bool, max_model_len: int
) -> list[int]:
    """One prompt as token ids, at least one. Raises InvalidRequest or ContextLengthExceeded."""
    if isinstance(prompt, str):
        check_num_chars(len(prompt), tokenizer, max_model_len, "prompt")
        prompt = await tokenizer.encode_text(prompt, add_special_tokens=add_special_tokens)
    else:
        check_token_ids(prompt, tokenizer, "prompt")
    if not prompt:
        raise InvalidRequest("'prompt' has no tokens", "prompt")
    return prompt


def split_prompts(prompt: Any, max_model_len: int) -> list[Prompt]:
    """The single prompts. Raises InvalidRequest or ContextLengthExceeded."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if len(prompt) > max(max_model_len, MAX_PROMPTS):
            raise ContextLengthExceeded(
                f"'prompt' has {len(prompt)} items, but this model's maximum context length is "
                f"{max_model_len} tokens",
                "prompt",
            )
        if _is_ids(prompt):
            return [prompt]
        if len(prompt) > MAX_PROMPTS:
            raise InvalidRequest(
                f"'prompt' has {len(prompt)} prompts, but at most {MAX_PROMPTS} go in one request",
                "prompt",
            )
        if all(isinstance(one, str) or _is_ids(one) for one in prompt):
            return prompt
    raise InvalidRequest(
        "'prompt' must be a string, a list of strings, a list of token ids or a list of such lists",
        "prompt",
    )


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(type(item) is int for item in prompt)
