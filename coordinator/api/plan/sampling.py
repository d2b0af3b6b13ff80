"""How the tokens of a call's answers are sampled, and how their text is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from coordinator.api.read.fields import GenerationFields
from coordinator.models.model import Model
from coordinator.text import Tokenizer
from coordinator.text.parts.interface import FindsContent
from coordinator.text.threads import Asker
from pdserve.protocol import BadWord, SamplingParams
from pdserve.shared.errors import InvalidRequest

MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_LOGIT_BIAS = 1024  # entries; OpenAI allows 300
MAX_BAD_WORD_TOKENS = 2048  # of all bad words, each tokenised with and without a space before it
_NUM_KEYS_TOLD = 5  # invalid keys named in an error
_LEAST_TOP_P = 1e-9  # small enough to keep only the likeliest token
NO_IDS: Final[frozenset[int]] = frozenset()  # one for all: an empty set has 216 bytes


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the text of a choice is processed."""

    stops: tuple[str, ...] = ()
    content_start: Callable[[], FindsContent | None] = lambda: None  # stops count from there on
    include_stop: bool = False
    stop_ids: frozenset[int] = NO_IDS  # the client's stop tokens; the nodes stop at them
    min_tokens: int = 0  # stop strings are matched only after this many tokens
    skip_special_tokens: bool = True
    echoes_special_tokens: bool = False  # show special tokens of an echoed prompt
    kept_ids: frozenset[int] = NO_IDS  # special tokens that are never skipped
    tells_prompt_logprobs: bool = False  # return the log-probabilities of the prompt's tokens
    tells_ids: bool = False  # return the ids of all tokens, whether their text is shown or not


def text_options(fields: GenerationFields) -> TextOptions:
    """Return the text options of a request. Raises InvalidRequest."""
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"'stop' takes at most {MAX_STOPS} strings, not {len(stops)}", "stop")
    if any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise InvalidRequest(f"'stop' takes strings of up to {MAX_STOP_CHARS} characters", "stop")
    if not all(stops):
        raise InvalidRequest("'stop' must not contain an empty string", "stop")
    return TextOptions(
        stops=tuple(stops),
        stop_ids=frozenset(fields.stop_token_ids or []) or NO_IDS,
        include_stop=bool(fields.include_stop_str_in_output or fields.no_stop_trim),
        min_tokens=fields.min_tokens or 0,
        skip_special_tokens=fields.skip_special_tokens is not False,
        tells_prompt_logprobs=fields.prompt_logprobs is not None,
        tells_ids=bool(fields.return_token_ids),
    )


async def sampling_params(
    fields: GenerationFields,
    model: Model,
    asker: Asker,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: str,
) -> SamplingParams:
    """Return what all answers of a call share, with defaults filled in and token ids checked.

    What the client leaves out is the model's default. `generations.for_prompt` adds what depends on
    the prompt. Raises InvalidRequest.
    """
    _check_ends(fields, grammar)
    if fields.logprob_token_ids and logprobs is None:
        raise InvalidRequest("'logprob_token_ids' needs 'logprobs'", "logprob_token_ids")
    tokenizer, default = model.tokenizer, model.sampling
    top_k = default.top_k if fields.top_k is None else fields.top_k
    return SamplingParams(
        temperature=_or(fields.temperature, default.temperature),
        top_k=min(max(top_k, 0), tokenizer.num_ids),
        top_p=max(_or(fields.top_p, default.top_p), _LEAST_TOP_P),
        min_p=_or(fields.min_p, default.min_p),
        presence_penalty=_or(fields.presence_penalty, 0.0),
        frequency_penalty=_or(fields.frequency_penalty, 0.0),
        repetition_penalty=_or(fields.repetition_penalty, default.repetition_penalty),
        logit_bias=_logit_bias(fields.logit_bias or {}, tokenizer),
        allowed_token_ids=_ids(fields, "allowed_token_ids", tokenizer),
        bad_words=await _bad_words(fields, tokenizer, asker),
        min_tokens=fields.min_tokens or 0,
        ignore_eos=bool(fields.ignore_eos),
        stop_token_ids=_ids(fields, "stop_token_ids", tokenizer),
        logprobs=logprobs,
        logprob_token_ids=_ids(fields, "logprob_token_ids", tokenizer),
        grammar=grammar,
        prompt_logprobs=prompt_logprobs,
    )


async def _bad_words(fields: GenerationFields, tokenizer: Tokenizer, asker: Asker) -> list[BadWord]:
    """Return how each bad word is tokenised at the beginning of a text, and after a space.

    Raises InvalidRequest.
    """
    words = [word.lstrip(" ") for word in fields.bad_words or []]
    texts = list(dict.fromkeys(space + word for word in words for space in ("", " ")))
    encoded = await tokenizer.encode_texts(texts, asker, add_special_tokens=False)
    num_tokens = sum(map(len, encoded))
    if num_tokens > MAX_BAD_WORD_TOKENS:
        raise InvalidRequest(
            f"'bad_words' are {num_tokens} tokens, with and without a space before each word; all "
            f"together can be at most {MAX_BAD_WORD_TOKENS}: leave some out, or shorten them",
            "bad_words",
        )
    return [BadWord(token_ids=token_ids) for token_ids in encoded if token_ids]


def _check_ends(fields: GenerationFields, grammar: str) -> None:
    """Refuse parameters that contradict a grammar about where the answer ends.

    Raises InvalidRequest.
    """
    for param, is_set in (("min_tokens", fields.min_tokens), ("ignore_eos", fields.ignore_eos)):
        if grammar and is_set:
            raise InvalidRequest(
                f"{param!r} cannot be combined with structured output or strict tools", param
            )


def _ids(fields: GenerationFields, param: str, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of a parameter, each once. Raises InvalidRequest."""
    token_ids: list[int] = getattr(fields, param) or []
    tokenizer.check_ids(token_ids, param)
    return list(dict.fromkeys(token_ids))


def _logit_bias(bias: dict[str, float], tokenizer: Tokenizer) -> dict[int, float]:
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            f"'logit_bias' takes at most {MAX_LOGIT_BIAS} entries, not {len(bias)}; to allow only "
            "some tokens, use 'allowed_token_ids'",
            "logit_bias",
        )
    if bad := [key for key in bias if not (key.isascii() and key.isdigit() and len(key) < 10)]:
        shown = ", ".join(repr(key[:64]) for key in bad[:_NUM_KEYS_TOLD])
        raise InvalidRequest(f"'logit_bias' has keys that are not token ids: {shown}", "logit_bias")
    by_id = {int(key): value for key, value in bias.items()}
    tokenizer.check_ids(by_id, "logit_bias")
    return by_id


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)
