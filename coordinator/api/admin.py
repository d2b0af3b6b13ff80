"""Endpoints that change the cluster: POST /admin/role sets a node's role."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from coordinator.api.answer.bodies import json_answer
from coordinator.api.context import CONTEXT
from coordinator.api.openapi.operation import Operation
from coordinator.api.read.body import read_request
from coordinator.api.routes import add_routes, post
from coordinator.pools.role_changes import RoleChanges
from pdserve.protocol import NodeRole

_CHANGES = web.AppKey("ROLE_CHANGES", RoleChanges)


class RoleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /admin/role."""

    node: str
    role: Literal["prefill", "decode"]
    force: bool = False  # even if this leaves the node's current pool empty
    timeout_s: Annotated[float, Meta(gt=0, le=600)] = 10.0


class RoleAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to POST /admin/role."""

    node: str
    role: Literal["prefill", "decode"]
    changed: bool  # False: the node already had that role


_CHANGE_ROLE = Operation(
    method="post",
    tag="Cluster",
    path="/admin/role",
    name="changeRole",
    summary="Move a node to the other pool.",
    body=RoleRequest,
    examples=({"node": "prefill-0", "role": "decode"},),
    answer=RoleAnswer,
    errors=(400, 401, 403, 404, 408, 409, 413, 415, 417, 502, 503, 504),
)


def add_admin_routes(app: web.Application, changes: RoleChanges) -> None:
    """Add the endpoint that changes roles. If API keys are in use, only operators may call it."""
    app[_CHANGES] = changes
    add_routes(app, [post("/admin/role", change_role)], [_CHANGE_ROLE])


async def change_role(request: web.Request) -> web.Response:
    """POST /admin/role: answer once the node has reported its new role or cannot take it."""
    body = await read_request(request, RoleRequest, request.app[CONTEXT].config)
    changed = await request.app[_CHANGES].change(
        body.node, NodeRole[body.role.upper()], force=body.force, within_s=body.timeout_s
    )
    answer = RoleAnswer(node=body.node, role=body.role, changed=changed)
    return json_answer(answer)
