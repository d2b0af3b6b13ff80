"""Endpoints that change the cluster: POST /admin/role sets a node's role."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from coordinator.api.body import expect_nothing, read_request
from coordinator.api.context import CONTEXT
from coordinator.api.json_answer import json_answer
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


def add_admin_routes(app: web.Application, changes: RoleChanges) -> None:
    """Add the endpoint that changes roles. If API keys are in use, only operators may call it."""
    app[_CHANGES] = changes
    app.add_routes([web.post("/admin/role", change_role, expect_handler=expect_nothing)])


async def change_role(request: web.Request) -> web.Response:
    """POST /admin/role: answer once the node has reported its new role or cannot take it."""
    body = await read_request(request, RoleRequest, request.app[CONTEXT].config)
    changed = await request.app[_CHANGES].change(
        body.node, NodeRole[body.role.upper()], force=body.force, within_s=body.timeout_s
    )
    answer = RoleAnswer(node=body.node, role=body.role, changed=changed)
    return json_answer(answer)
