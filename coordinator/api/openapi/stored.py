"""The operations on a response that was stored."""

from __future__ import annotations

from functools import partial

from coordinator.api.openapi.operation import Operation, Parameter
from coordinator.api.responses_api.kept import DEFAULT_ITEMS, MAX_ITEMS
from coordinator.api.responses_api.objects import DeletedResponse, ItemList, Response

_ID = Parameter("path", "response", {"type": "string"}, "The response's id.")
_of_response = partial(Operation, tag="Generation", errors=(400, 401, 404), parameters=(_ID,))

STORED = (
    _of_response(
        method="get",
        path="/v1/responses/{response}",
        name="getResponse",
        summary="A response that was stored.",
        answer=Response,
        parameters=(
            _ID,
            Parameter("query", "stream", {"const": "false"}, "A stored response is not streamed."),
        ),
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
        parameters=(
            _ID,
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
        ),
    ),
    _of_response(
        method="post",
        path="/v1/responses/{response}/cancel",
        name="cancelResponse",
        summary="Always refused: no response is made in the background.",
    ),
)
