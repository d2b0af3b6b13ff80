"""What a probe without a certificate is told of a node."""

from __future__ import annotations

import aiohttp

from pdserve.node.reports.metrics_server import MetricsServer
from pdserve.protocol import NodeState

STATES = ["standby", *(state.name.lower() for state in NodeState)]


async def test_a_probe_is_told_whether_the_node_is_well() -> None:
    state = ""
    server = MetricsServer(lambda: iter(()), lambda after: b"", lambda: state)
    port = await server.start("127.0.0.1", 0)
    told = []
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        for each in STATES:
            state = each
            async with client.get("/health") as response:
                told.append((response.status == 200, await response.text()))
    await server.close()
    assert told == [(each in ("ready", "standby"), each) for each in STATES]
