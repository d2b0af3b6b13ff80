"""The operations of the Responses API: a row for each of its routes."""

from __future__ import annotations

from functools import partial
from typing import get_args

from coordinator.api.openapi.operation import (
    COUNTS,
    GENERATES,
    READS_BODY,
    TERMS,
    Operation,
    in_path,
    in_query,
)
from coordinator.api.responses.events import StreamEvent
from coordinator.api.responses.items import KeptItem
from coordinator.api.responses.objects import (
    CompactedResponse,
    Conversation,
    DeletedConversation,
    DeletedResponse,
    InputTokens,
    ItemList,
    Response,
)
from coordinator.api.responses.requests import (
    CompactRequest,
    ConversationRequest,
    ConversationUpdate,
    Includable,
    NewItems,
    ResponseRequest,
)
from coordinator.stateful.pages import DEFAULT_ITEMS, INCLUDE, MAX_ITEMS
from coordinator.stateful.stored_responses import MAX_SEQUENCE_NUMBER

_RESPONSE = in_path("response", "The response's id.")
_CONVERSATION = in_path("conversation", "The conversation's id.")
_ITEM = in_path("item", "The item's id.")
_INCLUDE = tuple(
    in_query(
        name,
        "Accepted and ignored: all that is stored is always shown.",
        enum=list(get_args(Includable)),
    )
    for name in INCLUDE
)
_PAGE = (
    in_query(
        "limit",
        "The maximum number of items on a page.",
        type="integer",
        minimum=1,
        maximum=MAX_ITEMS,
        default=DEFAULT_ITEMS,
    ),
    in_query(
        "order",
        "Whether the oldest or the newest items come first.",
        enum=["asc", "desc"],
        default="desc",
    ),
    in_query("after", "The id of the last item on the page before.", type="string"),
    *_INCLUDE,
)
_STREAM = (
    in_query(
        "stream",
        "Whether to stream the events of a response created with `background` and `stream`.",
        enum=["true", "false"],
        default="false",
    ),
    in_query(
        "starting_after",
        "The sequence number of an event: the stream begins with the next one.",
        type="integer",
        minimum=0,
        maximum=MAX_SEQUENCE_NUMBER,
    ),
    *_INCLUDE,
)
_generates = partial(Operation, method="post", errors=GENERATES, parameters=TERMS)
_of_response = partial(Operation, tag="Generation", errors=(400, 401, 404), parameters=(_RESPONSE,))
_of_conversation = partial(
    Operation, tag="Conversations", errors=(401, 404), parameters=(_CONVERSATION,)
)
_MESSAGE = {"role": "user", "content": "Hi"}

OPERATIONS = (
    _generates(
        path="/v1/responses",
        name="createResponse",
        tag="Generation",
        summary="Answer a conversation, or continue an earlier response.",
        body=ResponseRequest,
        examples=(
            {"model": "M", "input": "Hi", "instructions": "Be brief."},
            {
                "model": "M",
                "input": [
                    {"role": "user", "content": "Rain?"},
                    {
                        "type": "function_call",
                        "call_id": "call_1",
                        "name": "weather",
                        "arguments": "{}",
                    },
                    {"type": "function_call_output", "call_id": "call_1", "output": "No."},
                ],
                "stream": True,
            },
        ),
        answer=Response,
        events=StreamEvent,
    ),
    _generates(
        path="/v1/responses/compact",
        name="compactConversation",
        tag="Generation",
        summary="Have the model summarise a conversation, to continue it from the summary.",
        body=CompactRequest,
        examples=({"model": "M", "input": "Hi", "instructions": "Be brief."},),
        answer=CompactedResponse,
    ),
    Operation(
        method="post",
        path="/v1/responses/input_tokens",
        name="countInputTokens",
        tag="Generation",
        summary="Count the input tokens of a createResponse request.",
        body=ResponseRequest,
        examples=({"model": "M", "input": "Hi"},),
        answer=InputTokens,
        errors=COUNTS,
    ),
    Operation(
        method="get",
        path="/v1/responses",
        name="respondOverWebsocket",
        tag="Generation",
        summary="Open a WebSocket: each message is a createResponse, answered by its events.",
        errors=(401, 403, 426),
    ),
    _of_response(
        method="get",
        path="/v1/responses/{response}",
        name="getResponse",
        summary="Get a response that is stored or is being made in the background.",
        answer=Response,
        events=StreamEvent,
        parameters=(_RESPONSE, *_STREAM),
    ),
    _of_response(
        method="delete",
        path="/v1/responses/{response}",
        name="deleteResponse",
        summary="Delete a stored response.",
        answer=DeletedResponse,
        errors=(401, 404),
    ),
    _of_response(
        method="get",
        path="/v1/responses/{response}/input_items",
        name="listInputItems",
        summary="List the input items of a stored response, page by page.",
        answer=ItemList,
        parameters=(_RESPONSE, *_PAGE),
    ),
    _of_response(
        method="post",
        path="/v1/responses/{response}/cancel",
        name="cancelResponse",
        summary="Cancel a background response.",
        answer=Response,
    ),
    _of_conversation(
        method="post",
        path="/v1/conversations",
        name="createConversation",
        summary="Create a conversation, to which responses can add items.",
        body=ConversationRequest,
        examples=({"items": [_MESSAGE], "metadata": {"topic": "rain"}},),
        answer=Conversation,
        errors=READS_BODY,
        parameters=(),
    ),
    _of_conversation(
        method="get",
        path="/v1/conversations/{conversation}",
        name="getConversation",
        summary="Get a conversation, without its items.",
        answer=Conversation,
    ),
    _of_conversation(
        method="post",
        path="/v1/conversations/{conversation}",
        name="updateConversation",
        summary="Replace a conversation's metadata.",
        body=ConversationUpdate,
        examples=({"metadata": {"topic": "sun"}},),
        answer=Conversation,
        errors=READS_BODY,
    ),
    _of_conversation(
        method="delete",
        path="/v1/conversations/{conversation}",
        name="deleteConversation",
        summary="Delete a conversation.",
        answer=DeletedConversation,
    ),
    _of_conversation(
        method="post",
        path="/v1/conversations/{conversation}/items",
        name="createConversationItems",
        summary="Add items to a conversation.",
        body=NewItems,
        examples=({"items": [_MESSAGE]},),
        answer=ItemList,
        errors=READS_BODY,
        parameters=(_CONVERSATION, *_INCLUDE),
    ),
    _of_conversation(
        method="get",
        path="/v1/conversations/{conversation}/items",
        name="listConversationItems",
        summary="List the items of a conversation, page by page.",
        answer=ItemList,
        errors=(400, 401, 404),
        parameters=(_CONVERSATION, *_PAGE),
    ),
    _of_conversation(
        method="get",
        path="/v1/conversations/{conversation}/items/{item}",
        name="getConversationItem",
        summary="Get an item of a conversation.",
        answer=KeptItem,
        errors=(400, 401, 404),
        parameters=(_CONVERSATION, _ITEM, *_INCLUDE),
    ),
    _of_conversation(
        method="delete",
        path="/v1/conversations/{conversation}/items/{item}",
        name="deleteConversationItem",
        summary="Delete an item from a conversation.",
        answer=Conversation,
        parameters=(_CONVERSATION, _ITEM),
    ),
)
