"""Asks a node to drain, as SIGTERM at its own machine would."""

from __future__ import annotations

import logging

from coordinator.pools.role_changes import RoleChanges

log = logging.getLogger(__name__)


class Drains:
    """What operators may take from one coordinator's members."""

    def __init__(self, changes: RoleChanges) -> None:
        self._changes = changes

    def order(self, node_id: str, *, force: bool = False) -> None:
        """Have a node finish what it runs, or move it elsewhere, and end.

        With `force`, its pool may become empty. What runs the node may start it again.

        Raises:
            NodeNotFound: there is no such node; lists the attached ones.
            RoleRefused: the mode needs its pool, and it is the only ready node of it.
        """
        member = self._changes.find(node_id)
        if member.is_ready and not force:
            self._changes.check_may_leave(member)
        log.info("%s is to drain", node_id)
        member.drain()
