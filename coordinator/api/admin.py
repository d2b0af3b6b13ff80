"""The endpoints that change the cluster: the role of a node."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from coordinator.api.body import expect_nothing, read_request
from coordinator.api.context import CONTEXT
from coordinator.api.json_answer import json_answer
from coordinator.role_changes import RoleChanges
from pdserve.protocol import NodeRole

_CHANGES = web.AppKey("ROLE_CHANGES", RoleChanges)


class RoleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /admin/role."""

    node: str
    role: Literal["prefill", "decode"]
    force: bool = False  # even if its pool is empty then
    timeout_s: Annotated[float, Meta(gt=0, le=600)] = 10.0


class RoleAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    node: str
    role: Literal["prefill", "decode"]
    changed: bool  # False: it had that role already


def add_admin_routes(app: web.Application, changes: RoleChanges) -> None:
    """Let clients change roles. Where keys are in use, operators may."""
    app[_CHANGES] = changes
    app.add_routes([web.post("/admin/role", change_role, expect_handler=expect_nothing)])


async def change_role(request: web.Request) -> web.Response:
    """POST /admin/role: answers when the node has reported its new role, or cannot."""
    body = await read_request(request, RoleRequest, request.app[CONTEXT].config)
    changed = await request.app[_CHANGES].change(
        body.node, NodeRole[body.role.upper()], force=body.force, within_s=body.timeout_s
    )
    answer = RoleAnswer(node=body.node, role=body.role, changed=changed)
    return json_answer(answer)
