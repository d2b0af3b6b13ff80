"""Checks of size: prompts and outputs against the context length, token ids against the vocabulary.

A request that cannot fit is refused before any work is done for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from coordinator.api.read.fields import CallFields
from coordinator.generation import GenerationRequest
from coordinator.text import Tokenizer
from pdserve.errors import ContextLengthExceeded, InvalidRequest
from pdserve.protocol import SamplingParams

MAX_LOGPROBS = 1 << 18  # of one call: of all its answers and prompts, each as often as returned
MAX_ECHOED_TOKENS = 1 << 18  # of one call: its answers together


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


def check_echo(requests: Sequence[GenerationRequest], *, echoes: bool) -> None:
    """Check that a call's answers do not echo too much. Raises InvalidRequest."""
    num_echoed = sum(len(r.token_ids) for r in requests) if echoes else 0
    if num_echoed > MAX_ECHOED_TOKENS:
        raise InvalidRequest(
            f"the answers would echo {num_echoed} prompt tokens, but those of one call can echo at "
            f"most {MAX_ECHOED_TOKENS}: ask for fewer answers, or leave out 'echo'",
            "echo",
        )


def check_logprobs(
    requests: Sequence[GenerationRequest], num_per_prompt: int, *, echoes: bool
) -> None:
    """Check that a call's log-probabilities are not too many to return. Raises InvalidRequest.

    `requests` are grouped by prompt; the first of each group may have the prompt scored.
    """
    num_logprobs = 0
    for first in requests[::num_per_prompt]:
        per_token, num_prompt_tokens = logprobs_per_token(first.sampling), len(first.token_ids)
        of_prompt = max(
            num_prompt_tokens * per_token * echoes,
            _prompt_logprobs(first.sampling, num_prompt_tokens),
        )
        num_logprobs += num_per_prompt * (first.sampling.max_tokens * per_token + of_prompt)
    if num_logprobs > MAX_LOGPROBS:
        raise InvalidRequest(
            f"the call asks for up to {num_logprobs} log-probabilities (answers x tokens x listed "
            f"per token, those of prompts for each answer), but one call can have at most "
            f"{MAX_LOGPROBS}: ask for fewer answers, tokens, or likeliest tokens",
            "prompt_logprobs" if requests[0].sampling.logprobs is None else "logprobs",
        )


def logprobs_per_token(sampling: SamplingParams) -> int:
    """Return how many log-probabilities come with each token of an answer."""
    num_top = sampling.logprobs
    return 0 if num_top is None else 1 + max(num_top, len(sampling.logprob_token_ids))


def default_max_tokens(sampling: SamplingParams, num_prompt_tokens: int, num_answers: int) -> int:
    """Return max_tokens for a client that set none: as many as may have their log-probabilities."""
    per_token = num_answers * logprobs_per_token(sampling)
    if not per_token:
        return sampling.max_tokens
    left = MAX_LOGPROBS - num_answers * _prompt_logprobs(sampling, num_prompt_tokens)
    return max(1, sampling.min_tokens, min(sampling.max_tokens, left // per_token))


def _prompt_logprobs(sampling: SamplingParams, num_prompt_tokens: int) -> int:
    num_top = sampling.prompt_logprobs
    return 0 if num_top is None else num_prompt_tokens * (num_top + 1)


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
