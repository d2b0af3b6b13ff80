"""Bodies of the OpenAI API's responses."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType


class PromptTokensDetails(Struct):
    """Where the prompt's KV came from."""

    cached_tokens: int


class Usage(Struct):
    """Tokens of a whole call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(Struct):
    """How likely one token was in the place of a prompt's token."""

    logprob: float
    rank: int  # from 1, the likeliest
    decoded_token: str


# ---- chat --------------------------------------------------------------------------------------


class TopLogprob(Struct):
    """One likely token at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    """The chosen token at a position, and the likeliest ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Log-probabilities of a chat choice."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(Struct, kw_only=True):
    """A function that the model calls, or more of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str  # JSON


class MadeCall(Struct, kw_only=True):
    """A call, or, with its index, a piece of one."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCall


class AssistantMessage(Struct, kw_only=True):
    """The whole answer."""

    role: str = "assistant"
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MadeCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET
    refusal: None = None


class ChatChoice(Struct):
    """One finished answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None  # the stop string, or a stop token of the client's own
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
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(Struct):
    """What is new in an answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MadeCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """What is new in one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET  # with the finish reason
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    """One event of a chat stream; `usage` is there only when the client asked for it."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # in a choice's first


# ---- completions -------------------------------------------------------------------------------


class CompletionLogprobs(Struct):
    """Log-probabilities of a completion: parallel lists, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]  # null: the first of an echoed prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    """One completion, or what is new in it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET  # with the finish reason
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # in its first chunk
    token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """The answer to a completion request, and one event of its stream."""

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
    root: str  # as other servers have it: what the name stands for, which is itself
    parent: None = None
    max_model_len: int | None = None


class ModelList(Struct, kw_only=True):
    """All names."""

    object: str = "list"
    data: list[Model]


class ErrorDetail(Struct):
    """What went wrong, for programs and people."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    """The body of every response that is not a success."""

    error: ErrorDetail
