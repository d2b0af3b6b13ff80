"""The process of `pdserve bench coordinator` with all simulated nodes, and a server to compare."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import uvloop

from pdserve.commands.bench.coordinator.simulated_node import Beat, SimulatedNode
from pdserve.commands.bench.coordinator.sse_server import SseServer
from pdserve.protocol import NodeRole
from pdserve.shared.process.collector import freeze_loaded_objects

SIMULATED = "simulated-nodes"  # the process, and its command
_ROLES = {"prefill-0": NodeRole.PREFILL, "decode-0": NodeRole.DECODE}
NODE_IDS = list(_ROLES)


@dataclass(frozen=True, slots=True)
class NodesPlan:
    """The arguments of the process."""

    coordinator: str  # host:port
    port: int  # of the server that clients can call directly
    model_id: str
    step_ms: float

    @property
    def arguments(self) -> list[str]:
        """Its command line after `pdserve`."""
        return [
            "bench",
            SIMULATED,
            f"--coordinator={self.coordinator}",
            f"--port={self.port}",
            f"--model-id={self.model_id}",
            f"--step-ms={self.step_ms}",
        ]


def run(plan: NodesPlan) -> None:
    """Run until the parent ends the process."""
    uvloop.run(_serve(plan))


async def _serve(plan: NodesPlan) -> None:
    beat = Beat(plan.step_ms / 1e3)
    server = await SseServer(beat).start(plan.port)
    nodes = [
        SimulatedNode(node_id, role, plan.model_id, plan.coordinator, beat)
        for node_id, role in _ROLES.items()
    ]
    freeze_loaded_objects()  # a pause of this process would be taken for the coordinator's
    beat.start()
    async with server, asyncio.TaskGroup() as tasks:
        for node in nodes:
            tasks.create_task(node.run())
