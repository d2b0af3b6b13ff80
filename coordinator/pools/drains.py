"""Asks a node to drain, as SIGTERM at its own machine would."""

from __future__ import annotations

import logging

from coordinator.nodes.registry import Member, Registry
from coordinator.pools.role_changes import NEEDED
from pdserve.protocol import Drain
from pdserve.settings.config import Mode
from pdserve.shared.errors import NodeNotFound, RoleRefused

log = logging.getLogger(__name__)


class Drains:
    """What operators may take from one coordinator's members."""

    def __init__(self, registry: Registry, mode: Mode) -> None:
        self._registry = registry
        self._mode = mode
        self._asked: set[Member] = set()  # they may not have said yet that they drain
        registry.on_lost(self._asked.discard)

    def order(self, node_id: str, *, force: bool = False) -> None:
        """Have a node finish what it runs, or move it elsewhere, and end.

        With `force`, its pool may become empty. What runs the node may start it again.

        Raises:
            NodeNotFound: there is no such node; lists the attached ones.
            RoleRefused: the mode needs its pool, and it is the only ready node of it.
        """
        member = self._registry.find(node_id)
        if member is None:
            names = ", ".join(sorted(member.node_id for member in self._registry))
            raise NodeNotFound(
                f'there is no node "{node_id}"; attached: {names or "none"}', param="node"
            )
        role = member.role
        others = {*self._registry.ready(role)} - self._asked - {member}
        if not force and role in NEEDED[self._mode] and not others and member.is_ready:
            name = role.name.lower()
            raise RoleRefused(
                f"{node_id} is the only ready {name} node, and {self._mode} mode needs one: "
                "use force to drain it all the same"
            )
        self._asked.add(member)
        log.info("%s is to drain", node_id)
        member.send(Drain())
