"""The hello of a node that exists only in a test."""

from __future__ import annotations

from msgspec.structs import replace

from pdserve.kv import KvDtype, KvLayout
from pdserve.protocol import NodeHello, NodeRole, NodeState, TransportReach
from pdserve.protocol.version import PROTOCOL

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype=KvDtype.FLOAT32)


def node_hello(node_id: str, role: NodeRole = NodeRole.DECODE, **changes: object) -> NodeHello:
    """A valid hello of a ready node; `changes` are fields of NodeHello."""
    hello = NodeHello(
        node_id=node_id,
        incarnation="1",
        role=role,
        state=NodeState.READY,
        session_address=f"{node_id}:1",
        metrics_address=f"{node_id}:2",
        model_id="m",
        revision="r",
        layout=LAYOUT,
        num_blocks=100,
        max_model_len=64,
        introduction_key=bytes(32),
        transports=[TransportReach(name="tcp")],
        protocol=PROTOCOL,
    )
    return replace(hello, **changes)
