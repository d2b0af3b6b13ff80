"""Objects of the Responses API as clients get them."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from coordinator.api.answer import bodies
from coordinator.api.responses.items import CompactionItem, Item, KeptItem
from coordinator.api.responses.requests import (
    ConversationReference,
    FunctionTool,
    TextFormat,
    ToolChoice,
    Verbosity,
)

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class InputTokensDetails(Struct):
    """How many of the input tokens were prefix-cache hits."""

    cached_tokens: int
    cache_write_tokens: int = 0  # always 0: writing to the prefix cache is not charged


class OutputTokensDetails(Struct):
    """How many of the output tokens were reasoning."""

    reasoning_tokens: int


class ResponseUsage(Struct, kw_only=True):
    """Token counts of a call."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    tiers: list[bodies.TierUsage] | UnsetType = UNSET  # of a cascade


class IncompleteDetails(Struct):
    """Why the response is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(Struct):
    """Why the response failed."""

    code: str
    message: str


class ReasoningShown(Struct):
    """The requested reasoning settings; there is no summary."""

    effort: str | None = None
    summary: None = None


class TextShown(Struct):
    """The requested text settings."""

    format: TextFormat
    verbosity: Verbosity


class Response(Struct, kw_only=True):
    """A response, with the parameters of its request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus = "in_progress"
    background: bool
    conversation: ConversationReference | None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    frequency_penalty: float
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item] = []
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningShown
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: TextShown
    tool_choice: ToolChoice
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None


class DeletedResponse(Struct, kw_only=True):
    """The answer to DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class Conversation(Struct, kw_only=True):
    """A conversation, without its items."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(Struct, kw_only=True):
    """The answer to DELETE /v1/conversations/{id}."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True


class ItemList(Struct, kw_only=True):
    """A list of conversation items: a page, or the items just added."""

    object: Literal["list"] = "list"
    data: list[KeptItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class CompactedResponse(Struct, kw_only=True):
    """The answer to POST /v1/responses/compact: a summary from which to continue."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[CompactionItem]
    usage: ResponseUsage


class InputTokens(Struct, kw_only=True):
    """The answer to POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


def response_usage(usage: bodies.Usage, num_reasoning_tokens: int) -> ResponseUsage:
    """Convert chat's token counts, and add the number of reasoning tokens."""
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(num_reasoning_tokens),
        total_tokens=usage.total_tokens,
        tiers=usage.tiers,
    )
