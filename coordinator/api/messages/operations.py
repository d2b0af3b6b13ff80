"""The operations of the Messages API: a row for each of its routes."""

from __future__ import annotations

from coordinator.api.messages.errors import FailedCall
from coordinator.api.messages.events import MessageEvent
from coordinator.api.messages.objects import CountedTokens, MadeMessage
from coordinator.api.messages.requests import CountRequest, MessagesRequest
from coordinator.api.openapi.operation import TERMS, Operation

_COUNTS = (400, 401, 404, 408, 413, 415, 417, 429, 529)
_GENERATES = (*_COUNTS, 403, 500, 502, 504)
_HI = {"role": "user", "content": "Hi"}

OPERATIONS = (
    Operation(
        method="post",
        path="/v1/messages",
        name="createMessage",
        tag="Generation",
        summary="Answer a conversation, in Anthropic's form.",
        body=MessagesRequest,
        examples=(
            {"model": "M", "max_tokens": 16, "messages": [_HI]},
            {
                "model": "M",
                "max_tokens": 16,
                "system": "Be brief.",
                "messages": [_HI],
                "thinking": {"type": "adaptive"},
                "stream": True,
            },
        ),
        answer=MadeMessage,
        events=MessageEvent,
        parameters=TERMS,
        error=FailedCall,
        errors=_GENERATES,
    ),
    Operation(
        method="post",
        path="/v1/messages/count_tokens",
        name="countMessageTokens",
        tag="Generation",
        summary="Count the input tokens of a createMessage request.",
        body=CountRequest,
        examples=({"model": "M", "messages": [_HI]},),
        answer=CountedTokens,
        error=FailedCall,
        errors=_COUNTS,
    ),
)
