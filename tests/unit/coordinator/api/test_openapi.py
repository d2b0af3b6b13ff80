"""The document says what the server does, and the server does what the document says."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import aiohttp
import pytest
import requests
import schemathesis
from aiohttp import web
from hypothesis import HealthCheck, settings
from schemathesis.core.parameters import ParameterLocation
from schemathesis.pytest.lazy import get_all_tests
from schemathesis.specs.openapi import checks

from coordinator.api import HttpServer, create_app
from coordinator.api.admin import Ordered, add_admin_routes
from coordinator.api.openapi.document import DESCRIPTION
from coordinator.jobs.routes import add_job_routes
from coordinator.nodes.registry import Registry
from coordinator.nodes.revisions import Revisions
from coordinator.page.history import History
from coordinator.page.live import Live
from coordinator.page.routes import add_page_routes
from coordinator.pools.drains import Drains
from coordinator.pools.role_changes import RoleChanges
from coordinator.stateful.routes import add_stateful_routes
from pdserve.metrics import CoordinatorMetrics
from tests.fakes.generator import MODEL, FakeGenerator, tiny_catalog


def paths_of(app: web.Application) -> set[tuple[str, str]]:
    """As they are written in the document: patterns of path parameters are aiohttp's business."""
    found = set()
    for route in app.router.routes():
        assert route.resource is not None
        path = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.resource.canonical)
        found.add((route.method.lower(), path))
    return {(method, path) for method, path in found if method != "head"}


def app(*, with_page: bool = True) -> web.Application:
    """As the coordinator makes it, without nodes."""
    made = create_app(tiny_catalog())
    add_stateful_routes(made)
    add_job_routes(made)
    registry, mode = Registry(), "disaggregated"
    changes = RoleChanges(registry, mode, CoordinatorMetrics())
    revisions = Revisions(registry, lambda revision: True, {})
    ordered = Ordered(changes, Drains(changes), revisions)
    add_admin_routes(made, lambda node_id: ordered, lambda name: ordered)
    if with_page:
        add_page_routes(made, Live(FakeGenerator().status, dict, History()))
    return made


DOCUMENT: dict[str, Any] = json.loads(app()[DESCRIPTION].document)
LIKE_OTHERS = {  # they read as createChatCompletion, createResponse and createConversation do
    "include-operation-id": [
        "createCompletion",
        "countInputTokens",
        "compactConversation",
        "createConversationItems",
    ],
    "phases": {"coverage": {"enabled": False}},
}
NESTED = {  # a longest list of longest lists is more than any body may be
    "include-operation-id": ["createMessage", "countMessageTokens"],
    "phases": {"coverage": {"enabled": False}},
}
CONFIG = schemathesis.Config.from_dict({"operations": [LIKE_OTHERS, NESTED]})


def test_every_route_is_described_and_nothing_else() -> None:
    paths = DOCUMENT["paths"]
    described = {(method, path) for path, methods in paths.items() for method in methods}
    assert described == paths_of(app())


def test_references_lead_somewhere() -> None:
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(DOCUMENT)))
    assert references <= set(DOCUMENT["components"]["schemas"])
    schemathesis.openapi.from_dict(DOCUMENT).validate()


async def test_document_and_page_are_served() -> None:
    async with HttpServer(app()) as server, aiohttp.ClientSession(server.url) as client:
        async with client.get("/openapi.json") as response:
            assert (response.status, await response.json()) == (200, DOCUMENT)
        async with client.get("/docs") as response:
            page = await response.text()
            assert (response.status, response.content_type) == (200, "text/html")
    assert re.findall(r"https?://|src=|@import", page) == [], "it needs nothing from elsewhere"
    assert 'fetch("openapi.json")' in page


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a server with a loop of its own, because its client blocks."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(steps: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(steps, loop).result(30)

    server = HttpServer(app())
    run(server.start())
    yield server.url
    run(server.stop(grace_s=0.0))
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    """One for the thousands of calls: a connection for each took half of the time."""
    with requests.Session() as session:
        yield session


FEW = settings(
    max_examples=5,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
READ_ALIKE = {  # as completions, or as others of these: their many wrong forms say little new
    "createEmbedding",
    "countMessageTokens",
    "respondOverWebsocket",
    "compactConversation",
    "countInputTokens",
    "getOpenapi",
    "getResponse",
    "cancelResponse",
    "listInputItems",
    "listMessageBatches",
    "listFiles",
    "listConversationItems",
    "getConversation",
    "getConversationItem",
    "deleteConversation",
    "deleteConversationItem",
    "cancelMessageBatch",
    "getFile",
    "createChatCompletion",
    "createResponse",
    "createBatch",
    "rerank",
    "detokenize",
    "updateConversation",
    "shareRevisions",
    "scoreUnversioned",
    "rerankUnversioned",
    "rerankBare",
    "score",
    "createMessageBatch",
    "createConversation",
    "tokenize",
    "drainNode",
    "changeRole",
}
NO_END = "watchCluster"  # does not end by itself
OPERATIONS = [
    pytest.param(f"{method.upper()} {path}", marks=[pytest.mark.long] if name in READ_ALIKE else [])
    for path, methods in DOCUMENT["paths"].items()
    for method, described in methods.items()
    if (name := described["operationId"]) != NO_END
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_whatever_comes_is_answered_as_described(
    operation: str, url: str, session: requests.Session
) -> None:
    """In all kinds of ways, which are made for its path alone: those of all paths take long.

    A schema's parametrize() makes those when tests are collected, as every worker does, and gives
    them one name: of tests of one name, pytest-xdist runs the first.
    """
    path = operation.split()[1]
    described = DOCUMENT | {"paths": {path: DOCUMENT["paths"][path]}}
    made = get_all_tests(
        schema=schemathesis.openapi.from_dict(described, config=CONFIG),
        test_func=is_answered_as_described,
        settings=FEW,
        given_kwargs=None,
    )
    (call,) = (call for each, call in (one.ok() for one in made) if each.label == operation)
    call(url=url, session=session)


def is_answered_as_described(case: schemathesis.Case, url: str, session: requests.Session) -> None:
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = MODEL  # else nearly everything is a 404
    if "X-Request-Timeout" in (case.headers or {}):
        case.headers["X-Request-Timeout"] = "9"  # one that is over before it begins is a 504
    excluded = [checks.positive_data_acceptance]  # a body may fit the schema, and not the context
    if not wrong_parts(case) <= {ParameterLocation.BODY, ParameterLocation.PATH}:
        excluded.append(checks.negative_data_rejection)  # unknown headers and queries are ignored
    case.call_and_validate(base_url=url, session=session, excluded_checks=excluded)


def wrong_parts(case: schemathesis.Case) -> set[ParameterLocation]:
    """What of the request breaks the schema on purpose."""
    if case.meta is None:
        return set()
    return {where for where, part in case.meta.components.items() if part.mode.is_negative}
