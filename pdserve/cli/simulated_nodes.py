"""The process of `pdserve bench coordinator` that has all nodes, and a server without a gateway."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import uvloop

from pdserve.bench.beat import Beat
from pdserve.bench.sse_server import SseServer
from pdserve.collector import keep_what_is_loaded
from pdserve.node.simulated import SimulatedNode
from pdserve.protocol import NodeRole

SIMULATED = "simulated-nodes"  # the process, and its command
_ROLES = {"prefill-0": NodeRole.PREFILL, "decode-0": NodeRole.DECODE}
NODE_IDS = list(_ROLES)


@dataclass(frozen=True, slots=True)
class NodesPlan:
    """What the process is told."""

    coordinator: str  # host:port
    port: int  # of the server without a gateway
    model_id: str
    step_ms: float

    @property
    def arguments(self) -> list[str]:
        """What follows `pdserve` on its command line."""
        return [
            "bench",
            SIMULATED,
            f"--coordinator={self.coordinator}",
            f"--port={self.port}",
            f"--model-id={self.model_id}",
            f"--step-ms={self.step_ms}",
        ]


def run(plan: NodesPlan) -> None:
    """Until the parent ends it."""
    uvloop.run(_serve(plan))


async def _serve(plan: NodesPlan) -> None:
    beat = Beat(plan.step_ms / 1e3)
    server = await SseServer(beat).start(plan.port)
    nodes = [
        SimulatedNode(node_id, role, plan.model_id, plan.coordinator, beat)
        for node_id, role in _ROLES.items()
    ]
    keep_what_is_loaded()  # a pause of this process would be taken for the coordinator's
    beat.start()
    async with server, asyncio.TaskGroup() as tasks:
        for node in nodes:
            tasks.create_task(node.run())
