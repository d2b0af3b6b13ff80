"""The cost of a gateway: a coordinator with simulated nodes, and other gateways for comparison.

A closed loop of streams is a gateway's full load. With long answers it shows the cost of a streamed
token, with short ones that of a request. An open loop, at a rate that all gateways can sustain,
shows how much TTFT they add. A server without a gateway gets the same load right after each. The
added TTFT is the difference between neighbouring rounds: of the two medians, and of the two 99th
percentiles. It includes the coordinator's messages to and from its nodes.

Throughput is also given per CPU second of the gateway's process, which other work on the machine
disturbs least. A busy gateway may put several tokens into one event, and so do less work per token:
`tokens_per_event` shows this. The client and the simulated servers share the cores that the gateway
does not have; their CPU time and the client's lag are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdserve.bench.coordinator.load import Gateway, GatewayLoad, LoadRound
from pdserve.bench.coordinator.plan import Chats, GatewayPlan
from pdserve.bench.coordinator.report import GatewayReport, GatewayRow, gateway_row
from pdserve.bench.serve.plan import Load
from pdserve.errors import ClusterError

_WARM_UP = Chats(8, 2, Load(concurrency=4))
_WARM_UP_S = 0.5


async def measure_gateways(
    gateways: Sequence[Gateway],
    direct: Gateway,
    plan: GatewayPlan,
    tell: Callable[[str], None] = lambda text: None,
) -> GatewayReport:
    """Run every case on every gateway, in turns with the server behind it.

    Raises:
        ClusterError: a server cannot be reached, or does not answer.
    """
    for gateway in (*gateways, direct):
        await _warm_up(gateway, plan)
    rows: list[GatewayRow] = []
    for chats in plan.cases:
        for gateway in gateways:
            pairs: list[tuple[LoadRound, LoadRound]] = []  # (through the gateway, directly)
            for number in range(plan.rounds):
                tell(f"{chats}, {gateway.name}, round {number + 1} of {plan.rounds}")
                load = GatewayLoad(chats, plan.duration_s, plan.drain_s, number)
                pairs.append((await load.run(gateway), await load.run(direct)))
            rows.append(gateway_row(chats, gateway.name, pairs))
    return GatewayReport(rows)


async def _warm_up(gateway: Gateway, plan: GatewayPlan) -> None:
    """Send a warm-up load. Raises ClusterError: the gateway does not serve."""
    served = await GatewayLoad(_WARM_UP, _WARM_UP_S, plan.drain_s, 0).run(gateway)
    broken = next((outcome for outcome in served.outcomes if outcome.end != "finished"), None)
    if broken is not None:
        raise ClusterError(f"{gateway.name} at {gateway.target.url} did not serve: {broken.error}")
