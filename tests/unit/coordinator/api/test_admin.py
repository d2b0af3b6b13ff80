"""POST /admin/role, with nodes that a test plays."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest

from coordinator.api import HttpServer, create_app
from coordinator.api.admin import Ordered, add_admin_routes
from coordinator.nodes.registry import Member, Registry
from coordinator.nodes.revisions import Revisions
from coordinator.pools.drains import Drains
from coordinator.pools.role_changes import RoleChanges
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import Drain, NodeRole, NodeState, SetRole
from tests.fakes.generator import tiny_catalog
from tests.fakes.members import join, report, said_to
from tests.fakes.outbox import RecordingOutbox

P, D = NodeRole.PREFILL, NodeRole.DECODE


class Obedient:
    """The outbox of a node that does as it is told at once."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.member: Member | None = None

    def send(self, message: msgspec.Struct) -> None:
        assert isinstance(message, SetRole)
        assert self.member is not None
        report(self._registry, self.member, message.role)


@pytest.fixture
def registry() -> Iterator[Registry]:
    registry = Registry()
    for node_id, role in (("p0", P), ("d0", D), ("d1", D)):
        member = join(registry, node_id, role)
        outbox = Obedient(registry)
        outbox.member = member
        member.outbox = outbox  # type: ignore[assignment]
    join(registry, "deaf", D)
    return registry


@asynccontextmanager
async def served(registry: Registry) -> AsyncIterator[aiohttp.ClientSession]:
    app = create_app(tiny_catalog())
    changes = RoleChanges(registry, "disaggregated", CoordinatorMetrics())
    revisions = Revisions(registry, lambda revision: True, {})
    ordered = Ordered(changes, Drains(changes), revisions)
    add_admin_routes(app, lambda node_id: ordered, lambda name: ordered)
    timeout = aiohttp.ClientTimeout(total=30)
    async with (
        HttpServer(app) as server,
        aiohttp.ClientSession(server.url, timeout=timeout) as client,
    ):
        yield client


async def test_a_node_changes_its_role_and_keeps_it(registry: Registry) -> None:
    body = {"node": "d0", "role": "prefill"}
    async with served(registry) as client:
        for changed in (True, False):
            async with client.post("/admin/role", json=body) as response:
                assert response.status == 200
                assert await response.json() == body | {"changed": changed}
    assert {member.node_id for member in registry.ready(P)} == {"p0", "d0"}


@pytest.mark.parametrize(
    ("body", "status", "code", "says"),
    [
        ({"node": "x", "role": "prefill"}, 404, "node_not_found", "attached: d0, d1, deaf, p0"),
        ({"node": "p0", "role": "decode"}, 409, "role_refused", "the only ready prefill node"),
        (
            {"node": "deaf", "role": "prefill", "timeout_s": 0.05},
            504,
            "deadline_exceeded",
            "deaf has not reported",
        ),
        ({"node": "d0", "role": "both"}, 400, "invalid_request", "both"),
        ({"role": "decode"}, 400, "invalid_request", "node"),
        ({"node": "d0", "role": "decode", "timeout_s": -1}, 400, "invalid_request", "timeout"),
    ],
)
async def test_what_cannot_be_done_is_said_as_everywhere_else(
    registry: Registry, body: dict[str, object], status: int, code: str, says: str
) -> None:
    async with served(registry) as client, client.post("/admin/role", json=body) as response:
        assert response.status == status
        error = (await response.json())["error"]
    assert error["code"] == code
    assert says in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


async def test_a_pool_can_be_emptied_by_force(registry: Registry) -> None:
    body = {"node": "p0", "role": "decode", "force": True}
    async with served(registry) as client, client.post("/admin/role", json=body) as response:
        assert response.status == 200
    assert registry.ready(P) == []


async def test_a_node_is_told_to_drain(registry: Registry) -> None:
    told = RecordingOutbox()
    member = registry.find("d0")
    assert member is not None
    member.outbox = told  # type: ignore[assignment]
    async with (
        served(registry) as client,
        client.post("/admin/drain", json={"node": "d0"}) as response,
    ):
        assert (response.status, await response.json()) == (200, {"node": "d0"})
    assert told.sent == [Drain()]


async def test_the_last_of_a_pool_stays_though_the_others_have_not_said_that_they_drain(
    registry: Registry,
) -> None:
    statuses = []
    for member in registry.ready(D):
        member.outbox = RecordingOutbox()  # type: ignore[assignment]
    async with served(registry) as client:
        for name in ("d0", "d1", "deaf"):
            async with client.post("/admin/drain", json={"node": name}) as response:
                statuses.append(response.status)
    assert statuses == [200, 200, 409]
    assert len(registry.ready(D)) == 3


async def test_a_node_that_is_not_ready_may_drain_though_its_pool_has_none(
    registry: Registry,
) -> None:
    for member in registry.ready(D):
        registry.remove(member)
    waiting = join(registry, "w", D, state=NodeState.LOADING)
    report(registry, waiting, D, state=NodeState.LOADING, is_standby=True)
    async with (
        served(registry) as client,
        client.post("/admin/drain", json={"node": "w"}) as response,
    ):
        assert (response.status, await response.json()) == (200, {"node": "w"})
    assert said_to(waiting) == [Drain()]


@pytest.mark.parametrize(
    ("body", "status", "code", "says"),
    [
        ({"node": "x"}, 404, "node_not_found", "attached: d0, d1, deaf, p0"),
        ({"node": "p0"}, 409, "role_refused", "the only ready prefill node"),
    ],
)
async def test_a_drain_that_is_refused(
    registry: Registry, body: dict[str, str], status: int, code: str, says: str
) -> None:
    async with served(registry) as client, client.post("/admin/drain", json=body) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (status, code)
    assert says in error["message"]
