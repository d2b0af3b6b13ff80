"""The operations on stored responses and conversations."""

from __future__ import annotations

from functools import partial
from typing import get_args

from coordinator.api.openapi.operation import READS_BODY, Operation, Parameter
from coordinator.api.responses_api.events import StreamEvent
from coordinator.api.responses_api.items import KeptItem
from coordinator.api.responses_api.kept import MAX_SEQUENCE_NUMBER
from coordinator.api.responses_api.objects import (
    Conversation,
    DeletedConversation,
    DeletedResponse,
    ItemList,
    Response,
)
from coordinator.api.responses_api.pages import DEFAULT_ITEMS, INCLUDE, MAX_ITEMS
from coordinator.api.responses_api.requests import (
    ConversationRequest,
    ConversationUpdate,
    Includable,
    NewItems,
)

_RESPONSE = Parameter("path", "response", {"type": "string"}, "The response's id.")
_CONVERSATION = Parameter("path", "conversation", {"type": "string"}, "The conversation's id.")
_ITEM = Parameter("path", "item", {"type": "string"}, "The item's id.")
_INCLUDE = tuple(
    Parameter("query", name, {"enum": list(get_args(Includable))}, "Is shown anyway, if there.")
    for name in INCLUDE
)
_PAGE = (
    Parameter(
        "query",
        "limit",
        {"type": "integer", "minimum": 1, "maximum": MAX_ITEMS, "default": DEFAULT_ITEMS},
        "Items of a page.",
    ),
    Parameter(
        "query",
        "order",
        {"enum": ["asc", "desc"], "default": "desc"},
        "The oldest or the newest first.",
    ),
    Parameter("query", "after", {"type": "string"}, "The id of the last page's last item."),
    *_INCLUDE,
)
_STREAM = (
    Parameter(
        "query",
        "stream",
        {"enum": ["true", "false"], "default": "false"},
        "Its events, if it was asked for with `background` and `stream`.",
    ),
    Parameter(
        "query",
        "starting_after",
        {"type": "integer", "minimum": 0, "maximum": MAX_SEQUENCE_NUMBER},
        "The number of the last event that is not wanted again.",
    ),
    *_INCLUDE,
)
_of_response = partial(Operation, tag="Generation", errors=(400, 401, 404), parameters=(_RESPONSE,))
_of_conversation = partial(
    Operation, tag="Conversations", errors=(401, 404), parameters=(_CONVERSATION,)
)
_MESSAGE = {"role": "user", "content": "Hi"}

STORED = (
    Operation(
        method="get",
        path="/v1/responses",
        name="respondOverWebsocket",
        tag="Generation",
        summary="A WebSocket: every message is a createResponse, and answered by its events.",
        errors=(401, 403, 426),
    ),
    _of_response(
        method="get",
        path="/v1/responses/{response}",
        name="getResponse",
        summary="A response that was stored, or is being made in the background.",
        answer=Response,
        events=StreamEvent,
        parameters=(_RESPONSE, *_STREAM),
    ),
    _of_response(
        method="delete",
        path="/v1/responses/{response}",
        name="deleteResponse",
        summary="Keep a response no longer.",
        answer=DeletedResponse,
        errors=(401, 404),
    ),
    _of_response(
        method="get",
        path="/v1/responses/{response}/input_items",
        name="listInputItems",
        summary="The conversation that a stored response answers, in pages.",
        answer=ItemList,
        parameters=(_RESPONSE, *_PAGE),
    ),
    _of_response(
        method="post",
        path="/v1/responses/{response}/cancel",
        name="cancelResponse",
        summary="Have a response in the background made no further.",
        answer=Response,
    ),
    _of_conversation(
        method="post",
        path="/v1/conversations",
        name="createConversation",
        summary="Begin a conversation that responses add to.",
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
        summary="A conversation, without its items.",
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
        summary="Keep a conversation no longer.",
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
        summary="The items of a conversation, in pages.",
        answer=ItemList,
        errors=(400, 401, 404),
        parameters=(_CONVERSATION, *_PAGE),
    ),
    _of_conversation(
        method="get",
        path="/v1/conversations/{conversation}/items/{item}",
        name="getConversationItem",
        summary="An item of a conversation.",
        answer=KeptItem,
        errors=(400, 401, 404),
        parameters=(_CONVERSATION, _ITEM, *_INCLUDE),
    ),
    _of_conversation(
        method="delete",
        path="/v1/conversations/{conversation}/items/{item}",
        name="deleteConversationItem",
        summary="Take an item out of a conversation.",
        answer=Conversation,
        parameters=(_CONVERSATION, _ITEM),
    ),
)
