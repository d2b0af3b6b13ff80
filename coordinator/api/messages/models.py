"""GET /v1/models as clients of the Messages API know it."""

from __future__ import annotations

from datetime import UTC, datetime

from aiohttp import web

from coordinator.api.answer.bodies import json_answer
from coordinator.api.context import ApiContext, RequestTrace
from coordinator.api.messages.objects import ModelPage, ModelShown
from coordinator.api.read.ask import Question
from coordinator.models.cascade import Cascade
from coordinator.models.model import ListedModel
from pdserve.shared.errors import InvalidRequest

_DEFAULT, _MOST = 20, 1000  # names on a page


async def list_models(question: Question) -> web.Response:
    """List the names of the served models, page by page."""
    context, trace = question.context, question.trace
    limit = _limit(question.query.get("limit"))
    adapters = context.models.adapters(trace.owner, trace.tenant.may_use)
    names = context.models.names(trace.owner) + [adapter.name for adapter in adapters]
    names += context.models.cascades(trace.owner)
    all_names = names
    before, after = question.query.get("before_id"), question.query.get("after_id")
    if before in names:
        names = names[: names.index(before)]
    if after in names:
        names = names[names.index(after) + 1 :]
    shown = names[-limit:] if before in all_names else names[:limit]
    page = ModelPage(
        data=[_shown(context, trace, name) for name in shown],
        has_more=len(shown) < len(names),
        first_id=shown[0] if shown else None,
        last_id=shown[-1] if shown else None,
    )
    return json_answer(page)


async def get_model(question: Question) -> web.Response:
    """Describe the model of one name."""
    return json_answer(_shown(question.context, question.trace, question.names["model"]))


def _limit(text: str | None) -> int:
    limit = int(text) if text is not None and text.isdecimal() and len(text) < 5 else None
    if text is None:
        return _DEFAULT
    if limit is None or not 1 <= limit <= _MOST:
        raise InvalidRequest(f"'limit' must be a number from 1 to {_MOST}", "limit")
    return limit


def _shown(context: ApiContext, trace: RequestTrace, name: str) -> ModelShown:
    found: Cascade | ListedModel | None = context.models.cascade(name, trace.owner)
    most = None
    if found is None:
        found = context.listed(name, trace)
        most = found.generator.max_model_len
    created = datetime.fromtimestamp(found.created, UTC).isoformat().replace("+00:00", "Z")
    return ModelShown(
        id=name, display_name=name, created_at=created, max_input_tokens=most, max_tokens=most
    )
