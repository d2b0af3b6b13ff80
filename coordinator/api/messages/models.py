"""GET /v1/models as clients of the Messages API know it."""

from __future__ import annotations

from datetime import UTC, datetime

from aiohttp import web

from coordinator.api.answer.bodies import json_answer
from coordinator.api.context import CONTEXT, TRACE
from coordinator.api.messages.objects import ModelPage, ModelShown
from coordinator.models.model import Model
from pdserve.shared.errors import InvalidRequest

_DEFAULT, _MOST = 20, 1000  # names on a page


async def list_models(request: web.Request) -> web.Response:
    """List the names of the served models, page by page."""
    context, trace = request.app[CONTEXT], request[TRACE]
    limit = _limit(request.query.get("limit"))
    adapters = context.models.adapters(trace.owner, trace.tenant.may_use)
    names = context.models.names(trace.owner) + [adapter.name for adapter in adapters]
    all_names = names
    before, after = request.query.get("before_id"), request.query.get("after_id")
    if before in names:
        names = names[: names.index(before)]
    if after in names:
        names = names[names.index(after) + 1 :]
    shown = names[-limit:] if before in all_names else names[:limit]
    page = ModelPage(
        data=[_shown(context.model_of(name, trace), name) for name in shown],
        has_more=len(shown) < len(names),
        first_id=shown[0] if shown else None,
        last_id=shown[-1] if shown else None,
    )
    return json_answer(page)


async def get_model(request: web.Request) -> web.Response:
    """Describe the model of one name."""
    name = request.match_info["model"]
    return json_answer(_shown(request.app[CONTEXT].model_of(name, request[TRACE]), name))


def _limit(text: str | None) -> int:
    limit = int(text) if text is not None and text.isdecimal() and len(text) < 5 else None
    if text is None:
        return _DEFAULT
    if limit is None or not 1 <= limit <= _MOST:
        raise InvalidRequest(f"'limit' must be a number from 1 to {_MOST}", "limit")
    return limit


def _shown(model: Model, name: str) -> ModelShown:
    most = model.generator.max_model_len
    created = datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z")
    return ModelShown(
        id=name, display_name=name, created_at=created, max_input_tokens=most, max_tokens=most
    )
