"""Endpoints that change the cluster: roles of nodes, drains, and which revisions serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from coordinator.api.calls import ordered
from coordinator.api.openapi.operation import Operation
from coordinator.api.routes import add_routes, post
from coordinator.nodes.revisions import Revisions
from coordinator.pools.drains import Drains
from coordinator.pools.role_changes import RoleChanges
from pdserve.protocol import NodeRole

RevisionPrefix = Annotated[str, Meta(min_length=1, max_length=256)]


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


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /admin/drain."""

    node: str
    force: bool = False  # even if this leaves the node's pool empty


class DrainAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to POST /admin/drain: the node was told, and says so in its next report."""

    node: str


class SharesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /admin/revisions."""

    shares: dict[RevisionPrefix, Annotated[float, Meta(ge=0)]] | None = None  # None: only asked
    model: str | None = None  # whose revisions; None: of the first one


class SharesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to POST /admin/revisions."""

    shares: dict[str, float]  # by the first characters of a revision
    attached: list[str]  # the revisions of the nodes


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


_DRAIN = Operation(
    method="post",
    tag="Cluster",
    path="/admin/drain",
    name="drainNode",
    summary="Have a node finish what it runs, or move it elsewhere, and end.",
    body=DrainRequest,
    examples=({"node": "decode-0"},),
    answer=DrainAnswer,
    errors=(400, 401, 403, 404, 408, 409, 413, 415, 417, 503),
)


_SHARE = Operation(
    method="post",
    tag="Cluster",
    path="/admin/revisions",
    name="shareRevisions",
    summary="Serve revisions of the model side by side, each with a share of the conversations.",
    body=SharesRequest,
    examples=({"shares": {"4f0c": 0.9, "d81a": 0.1}},),
    answer=SharesAnswer,
    errors=(400, 401, 403, 404, 408, 413, 415, 417, 503),
)


@dataclass(frozen=True, slots=True)
class Ordered:
    """What orders to the nodes of one model change."""

    changes: RoleChanges
    drains: Drains
    revisions: Revisions


@dataclass(frozen=True, slots=True)
class _Orders:
    """Carries out what operators ask for."""

    of_node: Callable[[str], Ordered]
    of_model: Callable[[str | None], Ordered]

    async def share_revisions(self, body: SharesRequest) -> SharesAnswer:
        """POST /admin/revisions: answer with the shares from now on; without any, change none."""
        revisions = self.of_model(body.model).revisions
        if body.shares is not None:
            revisions.set(body.shares)
        return SharesAnswer(shares=revisions.shares, attached=revisions.attached)

    async def drain_node(self, body: DrainRequest) -> DrainAnswer:
        """POST /admin/drain: answer once the node has been told."""
        self.of_node(body.node).drains.order(body.node, force=body.force)
        return DrainAnswer(node=body.node)

    async def change_role(self, body: RoleRequest) -> RoleAnswer:
        """POST /admin/role: answer once the node has reported its new role or cannot take it."""
        changes = self.of_node(body.node).changes
        changed = await changes.change(
            body.node, NodeRole[body.role.upper()], force=body.force, within_s=body.timeout_s
        )
        return RoleAnswer(node=body.node, role=body.role, changed=changed)


def add_admin_routes(
    app: web.Application,
    of_node: Callable[[str], Ordered],
    of_model: Callable[[str | None], Ordered],
) -> None:
    """Add what changes the cluster. If API keys are in use, only operators may call it.

    Args:
        app: gets the routes.
        of_node: whose orders go to the node with this id.
        of_model: and to those of the model of this name; None: the first. Raises ModelNotFound.
    """
    orders = _Orders(of_node, of_model)
    routes = [
        post("/admin/role", ordered(RoleRequest, orders.change_role)),
        post("/admin/drain", ordered(DrainRequest, orders.drain_node)),
        post("/admin/revisions", ordered(SharesRequest, orders.share_revisions)),
    ]
    add_routes(app, routes, [_CHANGE_ROLE, _DRAIN, _SHARE])
