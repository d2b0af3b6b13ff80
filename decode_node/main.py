"""`pdserve decode`: the decode node's process."""

from decode_node.service import DecodeNode
from pdserve.config import NodeConfig
from pdserve.node import runtime
from pdserve.protocol import NodeRole


def run(config: NodeConfig) -> None:
    """Run until drained.

    Raises:
        PdserveError: it cannot start.
    """
    runtime.run(config, NodeRole.DECODE, DecodeNode)
