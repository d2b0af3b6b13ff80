"""What fits into the context: texts before they are tokenised, and prompts with their answers."""

from __future__ import annotations

import msgspec

from coordinator.api.read.fields import CallFields
from coordinator.text import Tokenizer
from pdserve.shared.errors import ContextLengthExceeded, InvalidRequest


class FittedPrompt(msgspec.Struct, frozen=True):
    """The tokens of a prompt, and how many more the context holds."""

    token_ids: list[int]
    num_left: int


def check_num_chars(num_chars: int, tokenizer: Tokenizer, max_model_len: int, param: str) -> None:
    """Check that a text could fit into the context under the most compact tokenisation.

    Raises ContextLengthExceeded.
    """
    if num_chars > max_model_len * tokenizer.max_chars_per_token:
        raise ContextLengthExceeded(
            f"this model's maximum context length is {max_model_len} tokens, which the "
            f"{num_chars} characters of {param!r} exceed by far",
            param,
        )


def fitted(
    token_ids: list[int], fields: CallFields, requested: int | None, max_model_len: int
) -> FittedPrompt:
    """Return a prompt, truncated if that is asked for, that leaves `requested` tokens or one.

    Raises InvalidRequest or ContextLengthExceeded.
    """
    token_ids = truncated(token_ids, fields, requested or 1, max_model_len)
    return FittedPrompt(token_ids, num_left(len(token_ids), requested, max_model_len))


def truncated(
    token_ids: list[int], fields: CallFields, requested: int, max_model_len: int
) -> list[int]:
    """Truncate a prompt to `truncate_prompt_tokens`: its end, or its beginning if so requested.

    -1 keeps as many tokens as fit beside `requested` output tokens. Raises InvalidRequest.
    """
    wanted = fields.truncate_prompt_tokens
    if wanted is None:
        return token_ids
    if wanted == 0:
        raise InvalidRequest(
            "'truncate_prompt_tokens' must be the number of tokens to keep, or -1 for as many as "
            "fit; it cannot be 0",
            "truncate_prompt_tokens",
        )
    num_kept = max(1, max_model_len - requested) if wanted == -1 else wanted
    return token_ids[:num_kept] if fields.truncation_side == "right" else token_ids[-num_kept:]


def num_left(num_prompt_tokens: int, requested: int | None, max_model_len: int) -> int:
    """Return how many tokens the context holds beside a prompt: at least `requested`, or one.

    Raises ContextLengthExceeded.
    """
    left = max_model_len - num_prompt_tokens
    if left < (requested or 1):
        wanted = f"{requested} to generate" if requested else "at least 1 to generate"
        raise ContextLengthExceeded(
            f"this model's maximum context length is {max_model_len} tokens, but the request has "
            f"{num_prompt_tokens} in the prompt and {wanted}"
        )
    return left
