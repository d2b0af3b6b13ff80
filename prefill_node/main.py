"""`pdserve prefill`: the prefill node's process."""

from pdserve.config import NodeConfig
from pdserve.node import runtime
from pdserve.protocol import NodeRole
from prefill_node.service import PrefillNode


def run(config: NodeConfig) -> None:
    """Run until drained.

    Raises:
        PdserveError: it cannot start.
    """
    runtime.run(config, NodeRole.PREFILL, PrefillNode)
