"""Builds the OpenAPI 3.1 document from the table of operations."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from coordinator.api.openapi.operation import EVENTS, JSON, Operation, Parameter
from coordinator.api.openapi.operations import OPERATIONS
from coordinator.api.parameters import IGNORED, NEUTRAL
from coordinator.api.responses import ErrorBody
from coordinator.api.sse import DONE_DATA
from pdserve import __version__

_REF = "#/components/schemas/{name}"
_ERRORS = {
    400: "The request cannot be served as it stands; `param` names what is wrong with it.",
    401: "No API key, or nobody's.",
    403: "The API key is not good for this.",
    404: "What the request names is not here.",
    408: "The request's body did not arrive in time.",
    409: "It cannot be done now.",
    413: "The request's body is too large.",
    415: "The request's body is no JSON.",
    417: "What the request expects is not 100-continue.",
    426: "This is for WebSockets.",
    429: "Too much is asked for now, by this tenant or by all.",
    500: "A fault of the server.",
    502: "A node failed while it worked on the request.",
    503: "No node can serve the request now, or the server is about to stop.",
    504: "The time that the request was given is over.",
}
_LATER = (429, 503)  # statuses with a Retry-After header


@cache
def openapi_document() -> bytes:
    """Return the document as JSON."""
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "pdserve",
                "version": __version__,
                "description": "OpenAI's API in front of prefill and decode nodes.",
            },
            "servers": [{"url": "/"}],
            "security": [{}, {"key": []}],
            "paths": _paths(),
            "components": {
                "schemas": _components(),
                "securitySchemes": {
                    "key": {
                        "type": "http",
                        "scheme": "bearer",
                        "description": "An API key, where keys are in use.",
                    }
                },
            },
        }
    )


def _paths() -> dict[str, dict[str, Any]]:
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
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
        content[EVENTS] = {"schema": _event_schema(operation.events)}
    headers = {"x-request-id": _header("The request's id, for the log.", {"type": "string"})}
    answer = {"description": operation.summary, "headers": headers, "content": content}
    return {str(status): answer for status in (200, *operation.also)}


def _answer_schema(operation: Operation) -> dict[str, Any]:
    if operation.answer is not None:
        return _schema(operation.answer)
    return {"type": "object" if operation.media == JSON else "string"}


def _event_schema(events: Any) -> dict[str, Any]:
    """Return the schema of one event of a stream, which may be an error.

    OpenAPI 3.1 has no dedicated place for the schemas of events.
    """
    data = {"anyOf": [_schema(events), _schema(ErrorBody)]}
    text = {"type": "string", "contentMediaType": JSON, "contentSchema": data}
    last = {"const": DONE_DATA, "description": "The end, where there is no event for it."}
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
        content = {JSON: {"schema": _schema(ErrorBody)}}
        described[str(status)] = {"description": _ERRORS[status], "content": content}
        if status in _LATER:
            wait = _header("Seconds to wait.", {"type": "integer", "minimum": 1})
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


def _header(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "required": True, "schema": schema}


# ---- schemas -----------------------------------------------------------------------------------


def _types() -> list[Any]:
    """Return every type that has a schema, once."""
    types = [ErrorBody, *(t for o in OPERATIONS for t in (o.body, o.answer, o.events))]
    return list(dict.fromkeys(t for t in types if t is not None))


def _schema(of: Any) -> dict[str, Any]:
    schemas, _ = msgspec.json.schema_components([of], ref_template=_REF)
    return schemas[0]


def _components() -> dict[str, Any]:
    _, components = msgspec.json.schema_components(_types(), ref_template=_REF)
    for operation in OPERATIONS:
        if operation.body is not None:
            _close(components[operation.body.__name__])
    return components


def _close(body: dict[str, Any]) -> None:
    """Add the ignored and the neutral parameters to a body's schema, and forbid all others."""
    properties = body["properties"]
    for name in sorted(IGNORED - set(properties)):
        properties[name] = {"description": "Accepted, without effect."}
    for name in sorted(set(NEUTRAL) - set(properties) - IGNORED):
        allowed = [*NEUTRAL[name], None]
        properties[name] = {"enum": allowed, "description": "Not supported other than so."}
    body["additionalProperties"] = False
