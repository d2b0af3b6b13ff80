"""What a gateway costs: a coordinator in front of nodes that only pretend, and others beside it.

Each case is a length of answers: long ones show what a streamed token costs, short ones what a
request does. Each gateway has the case as a closed loop, which is its full load, and then as an
open loop at half the requests a second that it managed. A server without a gateway gets the same
load right after each, so what a gateway adds to TTFT is the difference of neighbours: of the two
medians, of the two 99th percentiles. The coordinator's way to its nodes and back is in it.

Throughput is also given per second of a core that the gateway's process has used, which other work
on the machine disturbs least. A gateway that falls behind puts several tokens into one event, and
so does less for each: `tokens_per_event` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdserve.bench.gateway_load import Gateway, GatewayLoad, LoadRound
from pdserve.bench.gateway_plan import Chats, GatewayPlan
from pdserve.bench.gateway_report import GatewayReport, GatewayRow, gateway_row
from pdserve.errors import ClusterError

_HALF = 0.5
_WARM_UP = Chats("warm-up", 8, 2)
_WARM_UP_S, _WARM_UP_STREAMS = 0.5, 4


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
            full: list[tuple[LoadRound, LoadRound]] = []  # (through the gateway, directly)
            half: list[tuple[LoadRound, LoadRound]] = []
            for number in range(plan.rounds):
                tell(f"{chats.name}, {gateway.name}, round {number + 1} of {plan.rounds}")
                load = GatewayLoad(chats, plan.duration_s, plan.drain_s, number)
                through = await load.closed(gateway, plan.streams)
                full.append((through, await load.closed(direct, plan.streams)))
                rate = _HALF * through.num_requests / through.seconds
                if not rate:
                    raise ClusterError(f"{gateway.name} ended no request in {plan.duration_s} s")
                half.append((await load.open(gateway, rate), await load.open(direct, rate)))
            rows.append(gateway_row(chats.name, gateway.name, "full", full))
            rows.append(gateway_row(chats.name, gateway.name, "half", half))
    return GatewayReport(plan.streams, rows)


async def _warm_up(gateway: Gateway, plan: GatewayPlan) -> None:
    """Raises ClusterError: it does not serve."""
    load = GatewayLoad(_WARM_UP, _WARM_UP_S, plan.drain_s, 0)
    served = await load.closed(gateway, _WARM_UP_STREAMS)
    broken = next((outcome for outcome in served.outcomes if outcome.end != "finished"), None)
    if broken is not None:
        raise ClusterError(f"{gateway.name} at {gateway.target.url} did not serve: {broken.error}")
