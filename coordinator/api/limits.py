"""Checks of size: prompts and outputs against the context length, token ids against the vocabulary.

A request that cannot fit is refused before any work is done for it.
"""

from __future__ import annotations

from collections.abc import Collection

from coordinator.api.fields import CallFields
from coordinator.text import Tokenizer
from pdserve.errors import ContextLengthExceeded, InvalidRequest

MAX_PROMPT_LOGPROBS = 1 << 20  # per prompt, as all of them are sent in one message


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


def check_token_ids(token_ids: Collection[int], tokenizer: Tokenizer, param: str) -> None:
    """Check that all token ids are in the vocabulary. Raises InvalidRequest."""
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < tokenizer.num_ids:
            raise InvalidRequest(
                f"{param!r} has token id {token_id}, which is out of vocabulary: there are "
                f"{tokenizer.num_ids} tokens, with ids from 0 to {tokenizer.num_ids - 1}",
                param,
            )


def check_scores(num_tokens: int, num_top: int, param: str) -> None:
    """Check that a prompt's log-probabilities are not too many to return. Raises InvalidRequest."""
    if num_tokens * (num_top + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"the prompt has {num_tokens} tokens; the {num_top} likeliest at each of them are more "
            f"than the {MAX_PROMPT_LOGPROBS} log-probabilities that one answer can hold",
            param,
        )


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


def output_limit(
    num_prompt_tokens: int, requested: int | None, default: int | None, max_model_len: int
) -> int:
    """Return the maximum number of output tokens: requested, default, or all that fit.

    Raises ContextLengthExceeded.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1 or (requested or 1) > room:
        wanted = f"{requested} to generate" if requested else "at least 1 to generate"
        raise ContextLengthExceeded(
            f"this model's maximum context length is {max_model_len} tokens, but the request has "
            f"{num_prompt_tokens} in the prompt and {wanted}"
        )
    if requested is not None:
        return requested
    return room if default is None else min(default, room)
