"""What a gateway costs: a coordinator in front of nodes that only pretend, and others beside it.

A closed loop of streams is a gateway's full load: with long answers it shows what a streamed token
costs, with short ones what a request does. An open loop, at a rate that all gateways can keep,
shows what they add to TTFT. A server without a gateway gets the same load right after each, so what
is added is the difference of neighbours: of the two medians, of the two 99th percentiles. The
coordinator's way to its nodes and back is in it.

Throughput is also given per second of a core that the gateway's process has used, which other work
on the machine disturbs least. A gateway that falls behind puts several tokens into one event, and
so does less for each: `tokens_per_event` says so. The client and the simulated servers share what
cores the gateway does not have: what they took is told, and by how much the client was late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdserve.bench.gateway_load import Gateway, GatewayLoad, LoadRound
from pdserve.bench.gateway_plan import Chats, GatewayPlan
from pdserve.bench.gateway_report import GatewayReport, GatewayRow, gateway_row
from pdserve.bench.serve_plan import Load
from pdserve.errors import ClusterError

_WARM_UP = Chats(8, 2, Load(concurrency=4))
_WARM_UP_S = 0.5


async def measure_gateways(
    gateways: Sequence[Gateway],
    direct: Gateway,
    plan: GatewayPlan,
    tell: Callable[[str], None] = lambda text: None,
) -> GatewayReport:
    """Every case on every gateway, in turns with the server behind it.

    Raises:
        ClusterError: a server is not there, or does not answer.
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
    """Raises ClusterError: it does not serve."""
    served = await GatewayLoad(_WARM_UP, _WARM_UP_S, plan.drain_s, 0).run(gateway)
    broken = next((outcome for outcome in served.outcomes if outcome.end != "finished"), None)
    if broken is not None:
        raise ClusterError(f"{gateway.name} at {gateway.target.url} did not serve: {broken.error}")
