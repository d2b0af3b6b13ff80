"""`pdserve prefill` and `pdserve decode`: a node's process. They differ in the role it begins with.

Here the two services meet, which know nothing of each other.
"""

from __future__ import annotations

from decode_node.service import DecodeNode
from pdserve.config import NodeConfig
from pdserve.node import runtime
from pdserve.node.roles import ServiceFactories
from pdserve.protocol import NodeRole
from prefill_node.service import PrefillNode

SERVICES = ServiceFactories(prefill=PrefillNode, decode=DecodeNode)


def run(config: NodeConfig, role: NodeRole) -> None:
    """Run until drained.

    Raises:
        PdserveError: it cannot start.
    """
    runtime.run(config, role, SERVICES)
