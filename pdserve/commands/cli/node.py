"""`pdserve prefill` and `pdserve decode`: the process of a node, differing in its first role.

The two services are combined here, because their packages do not import each other.
"""

from __future__ import annotations

from decode_node.service import DecodeNode
from pdserve.node import lives
from pdserve.node.roles import ServiceFactories
from pdserve.protocol import NodeRole
from pdserve.settings.config import NodeConfig
from prefill_node.service import PrefillNode

SERVICES = ServiceFactories(prefill=PrefillNode, decode=DecodeNode)


def run(config: NodeConfig, role: NodeRole) -> None:
    """Run until drained.

    Raises:
        PdserveError: it cannot start.
    """
    lives.run(config, role, SERVICES)
