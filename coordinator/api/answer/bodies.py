"""Response bodies of the OpenAI API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from aiohttp import web
from msgspec import UNSET, Raw, Struct, UnsetType

from pdserve.settings.prices import Price


class PromptTokensDetails(Struct):
    """How many of the prompt's tokens were prefix-cache hits."""

    cached_tokens: int
    # Of the prompt with most: computed with the weights of decode nodes, for lack of prefill nodes.
    decode_precision_tokens: int | UnsetType = UNSET  # if any were


class CompletionTokensDetails(Struct):
    """How many of the output tokens were reasoning, or had been guessed; wrong guesses are none."""

    reasoning_tokens: int | UnsetType = UNSET  # of chats
    accepted_prediction_tokens: int | UnsetType = UNSET  # both: if any were guessed
    rejected_prediction_tokens: int | UnsetType = UNSET


class TierUsage(Struct, frozen=True):
    """Token counts of one tier of a cascade."""

    model: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost: float | UnsetType = UNSET  # if it has a price, in the currency of that

    @classmethod
    def of(
        cls, model: str, price: Price | None, prompt: int, cached: int, completion: int
    ) -> TierUsage:
        """Return that of so many tokens, `cached` ones of the prompt's."""
        cost = UNSET if price is None else price.of(prompt, cached, completion)
        return cls(model, prompt, cached, completion, cost)


class Usage(Struct):
    """Token counts of a whole call; of a cascade, of the tier that answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    tiers: list[TierUsage] | UnsetType = UNSET  # of a cascade: all that were asked, in turn


class PromptLogprob(Struct):
    """The log-probability and rank of a token at one position of the prompt."""

    logprob: float
    rank: int  # 1 = the likeliest
    decoded_token: str


# ---- chat --------------------------------------------------------------------------------------


class TopLogprob(Struct):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    """The chosen token at a position, and the likeliest tokens there."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Log-probabilities of a chat choice."""

    content: list[Raw]  # encoded TokenLogprobs: all of a long answer at once would take too long
    refusal: None = None


class FunctionCall(Struct, kw_only=True):
    """A function call by the model, or in a stream more of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str  # JSON


class MadeCall(Struct, kw_only=True):
    """A tool call, or, if it has an index, a streamed piece of one."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCall


class AssistantMessage(Struct, kw_only=True):
    """The message of a whole answer."""

    role: str = "assistant"
    content: str | None
    reasoning_content: str | UnsetType | None = UNSET  # null: none, where it would be shown apart
    tool_calls: list[MadeCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET
    refusal: None = None


class ChatChoice(Struct):
    """One finished choice."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None  # the stop string, or the client's stop token
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    """The answer to a chat request."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str | UnsetType = UNSET  # if one was asked for
    prompt_logprobs: list[Raw] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(Struct):
    """New content of a streamed answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[MadeCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """New content of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET  # set with the finish reason
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    """One event of a chat stream; `usage` is present only if the client asked for it."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET  # if one was asked for
    prompt_token_ids: list[int] | UnsetType = UNSET  # only in a choice's first chunk


# ---- completions -------------------------------------------------------------------------------


class CompletionLogprobs(Struct):
    """Log-probabilities of a completion: parallel lists, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]  # null for the first token of an echoed prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    """One completion, or in a stream its new content."""

    index: int
    text: str
    logprobs: CompletionLogprobs | Raw | None  # encoded already if the answer is not streamed
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET  # set with the finish reason
    prompt_logprobs: list[Raw] | UnsetType = UNSET  # null or token id |-> PromptLogprob, encoded
    prompt_token_ids: list[int] | UnsetType = UNSET  # only in a choice's first chunk
    token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """The answer to a completion request, or one event of its stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


# ---- the rest ----------------------------------------------------------------------------------


class Model(Struct, kw_only=True):
    """A name under which the model is served."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "pdserve"
    root: str  # of an adapter, the folder that it is from; else equal to `id`
    parent: str | None = None  # of an adapter, the model
    tiers: list[str] | UnsetType = UNSET  # of a cascade, the models that it asks in turn
    needs_whole_answer: bool | UnsetType = UNSET  # of a cascade: before it shows any
    external_tiers: list[str] | UnsetType = UNSET  # elsewhere; what they stream cannot be resumed
    max_model_len: int | None = None


class ModelList(Struct, kw_only=True):
    """All names under which the model is served."""

    object: str = "list"
    data: list[Model]


class ErrorDetail(Struct):
    """An error's message, type, parameter and code."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    """The body of every error response."""

    error: ErrorDetail


def json_answer(
    body: msgspec.Struct | Mapping[str, object] | Sequence[msgspec.Struct], status: int = 200
) -> web.Response:
    """Return a response with `body` as JSON."""
    return web.Response(
        status=status, body=msgspec.json.encode(body), content_type="application/json"
    )
