"""Objects of the Messages API as clients get them."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from coordinator.api.answer import bodies

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]
Tier = Literal["standard", "priority", "batch"]


class ThinkingTokens(Struct):
    """How many of the output tokens were thinking."""

    thinking_tokens: int


class MessageUsage(Struct, kw_only=True):
    """Token counts. The prompt's are split: those that were cached, and the others."""

    input_tokens: int
    cache_creation_input_tokens: int = 0  # always 0: writing to the prefix cache is not charged
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | UnsetType = UNSET  # at the end
    service_tier: Tier | UnsetType = UNSET
    tiers: list[bodies.TierUsage] | UnsetType = UNSET  # of a cascade


class TextBlock(Struct, kw_only=True, tag_field="type", tag="text"):
    """Text that the model wrote."""

    text: str = ""


class ThinkingBlock(Struct, kw_only=True, tag_field="type", tag="thinking"):
    """What the model thought. It is sent back with its signature."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call of one of the client's tools."""

    id: str
    name: str
    input: dict[str, Any] = {}  # as far as it goes, if it was cut off


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MadeMessage(Struct, kw_only=True, tag_field="type", tag="message"):
    """An answer."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class CountedTokens(Struct):
    """The answer to POST /v1/messages/count_tokens."""

    input_tokens: int


class ModelShown(Struct, kw_only=True, tag_field="type", tag="model"):
    """A name under which a model is served."""

    id: str
    display_name: str
    created_at: str  # RFC 3339
    lifecycle: str = "active"
    max_input_tokens: int | None
    max_tokens: int | None


class ModelPage(Struct, kw_only=True):
    """Names under which models are served."""

    data: list[ModelShown]
    has_more: bool
    first_id: str | None
    last_id: str | None


def message_usage(usage: bodies.Usage, tier: Tier | UnsetType = UNSET) -> MessageUsage:
    """Convert chat's token counts."""
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
        tiers=usage.tiers,
        service_tier=tier,
    )
