"""The OpenAPI 3.1 document, built from the rows of all operations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

import msgspec
from aiohttp import web

from coordinator.api.answer.sse import DONE_DATA
from coordinator.api.context import ApiContext
from coordinator.api.openapi.operation import EVENTS, HTML, JSON, Operation, Parameter
from coordinator.api.read.body import IGNORED, NEUTRAL
from pdserve import __version__

_REF = "#/components/schemas/{name}"
_ERRORS = {
    400: "The request is invalid; `param` names the parameter.",
    401: "The API key is missing or unknown.",
    403: "The API key does not permit this, or the web page's origin is not allowed.",
    404: "The model, response, conversation, item or node does not exist.",
    408: "The request body did not arrive in time.",
    409: "The node cannot change its role now.",
    413: "The request body is too large.",
    415: "The request body is not JSON, or is compressed.",
    417: "The `Expect` header is not `100-continue`.",
    426: "The request is not a WebSocket handshake.",
    429: "The cluster is too busy, or the tenant has reached a rate limit.",
    500: "An internal error.",
    502: "A node failed while it worked on the request.",
    503: "No node can serve the request now, or the server is shutting down.",
    504: "The request was not complete before its deadline.",
    529: "The cluster is too busy, no node can serve the request, or the server is shutting down.",
}
_LATER = (429, 503, 529)  # statuses with a Retry-After header


class Description:
    """What an application serves: one operation per route."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    @cached_property
    def document(self) -> bytes:
        """The document as JSON, once all operations are there."""
        return _document(self.operations)

    async def get(self, _: ApiContext) -> web.Response:
        """GET /openapi.json: return the document."""
        return web.Response(body=self.document, content_type=JSON)


DESCRIPTION = web.AppKey("DESCRIPTION", Description)


def _document(operations: Sequence[Operation]) -> bytes:
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "pdserve",
                "version": __version__,
                "description": "The OpenAI API, served by separate prefill and decode nodes.",
            },
            "servers": [{"url": "/"}],
            "security": [{}, {"key": []}],
            "paths": _paths(operations),
            "components": {
                "schemas": _components(operations),
                "securitySchemes": {
                    "key": {
                        "type": "http",
                        "scheme": "bearer",
                        "description": "An API key, if the server requires one.",
                    }
                },
            },
        }
    )


def _paths(operations: Sequence[Operation]) -> dict[str, dict[str, Any]]:
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    return paths


def _described(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.name,
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": _answers(operation) | _errors(operation),
    }
    if operation.parameters:
        described["parameters"] = [_parameter(parameter) for parameter in operation.parameters]
    if operation.body is not None:
        examples = {f"example {i}": {"value": one} for i, one in enumerate(operation.examples, 1)}
        content = {JSON: {"schema": _schema(operation.body), "examples": examples}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _answers(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media: {"schema": _answer_schema(operation)}}
    if operation.events is not None:
        content[EVENTS] = {"schema": _event_schema(operation)}
    headers = {
        "x-request-id": _header("The request's id, as in the server's log.", {"type": "string"})
    }
    answer = {"description": operation.summary, "headers": headers, "content": content}
    return {str(status): answer for status in (200, *operation.also)}


def _answer_schema(operation: Operation) -> dict[str, Any]:
    if operation.answer is not None:
        return _schema(operation.answer)
    return {"type": "object" if operation.media == JSON else "string"}


def _event_schema(operation: Operation) -> dict[str, Any]:
    """Return the schema of one event of a stream, which may be an error.

    OpenAPI 3.1 has no dedicated place for the schemas of events.
    """
    data = {"anyOf": [_schema(operation.events), _schema(operation.error)]}
    text = {"type": "string", "contentMediaType": JSON, "contentSchema": data}
    last = {"const": DONE_DATA, "description": "The end of the stream, unless an event marks it."}
    return {
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": {"anyOf": [last, text]}},
        "required": ["data"],
    }


def _errors(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {}
    for status in operation.errors:
        if status in operation.also:
            continue
        content = {JSON: {"schema": _schema(operation.error)}}
        described[str(status)] = {"description": _ERRORS[status], "content": content}
        if status in _LATER:
            when = "Seconds to wait before a retry; absent if none can succeed."
            wait = _header(when, {"type": "integer", "minimum": 1}, is_required=False)
            described[str(status)]["headers"] = {"Retry-After": wait}
    return described


def _parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "in": parameter.where,
        "name": parameter.name,
        "required": parameter.where == "path",
        "schema": parameter.schema,
        "description": parameter.description,
    }


def _header(
    description: str, schema: dict[str, Any], *, is_required: bool = True
) -> dict[str, Any]:
    return {"description": description, "required": is_required, "schema": schema}


# ---- schemas -----------------------------------------------------------------------------------


def _types(operations: Sequence[Operation]) -> list[Any]:
    """Return every type that has a schema, once."""
    types = [t for o in operations for t in (o.error, o.body, o.answer, o.events)]
    return list(dict.fromkeys(t for t in types if t is not None))


def _schema(of: Any) -> dict[str, Any]:
    schemas, _ = msgspec.json.schema_components([of], ref_template=_REF)
    return schemas[0]


def _components(operations: Sequence[Operation]) -> dict[str, Any]:
    _, components = msgspec.json.schema_components(_types(operations), ref_template=_REF)
    for operation in operations:
        if operation.body is not None:
            _close(components[operation.body.__name__])
    return components


def _close(body: dict[str, Any]) -> None:
    """Add the ignored and the neutral parameters to a body's schema, and forbid all others."""
    properties = body["properties"]
    for name in sorted(IGNORED - set(properties)):
        properties[name] = {"description": "Accepted and ignored."}
    for name in sorted(set(NEUTRAL) - set(properties) - IGNORED):
        allowed = [*NEUTRAL[name], None]
        properties[name] = {"enum": allowed, "description": "Only these values are supported."}
    body["additionalProperties"] = False


async def get_page(_: ApiContext) -> web.Response:
    """GET /docs: return a page that shows the document without external resources."""
    return web.Response(body=_page(), content_type=HTML, charset="utf-8")


@cache
def _page() -> bytes:
    return files(__package__).joinpath("page.html").read_bytes()
