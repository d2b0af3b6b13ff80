"""The cost of a coordinator with simulated nodes, and of other servers in its place.

A closed loop of streams is a coordinator's full load. With long answers it shows the cost of a
streamed token, with short ones that of a request. An open loop, at a rate that all servers can
sustain, shows how much TTFT they add. The simulated server gets the same load directly, right after
each. The added TTFT is the difference between neighbouring rounds: of the two medians, and of the
two 99th percentiles. It includes the coordinator's messages to and from its nodes.

Throughput is also given per CPU second of the server's process, which other work on the machine
disturbs least. A busy one may put several tokens into one event, and so do less work per token:
`tokens_per_event` shows this. Servers take turns, round by round. The client and the simulated
server share the cores that the coordinator does not have; their CPU time and the client's lag are
reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

import msgspec

from pdserve.commands.bench.coordinator.config import Chats, CoordinatorPlan
from pdserve.commands.bench.coordinator.load import ChatLoad, LoadRound, MeasuredServer
from pdserve.commands.bench.load.outcome import Outcome, Percentiles
from pdserve.commands.bench.serve.config import Load
from pdserve.shared.errors import ClusterError

PLAIN: Final = "coordinator"
TRACED: Final = "coordinator with traces"
_WARM_UP = Chats(8, 2, Load(concurrency=4))
_WARM_UP_S = 0.5


async def measure_servers(
    servers: Sequence[MeasuredServer],
    direct: MeasuredServer,
    plan: CoordinatorPlan,
    tell: Callable[[str], None] = lambda text: None,
) -> CoordinatorReport:
    """Run every case on every server, in turns with the one behind it.

    Raises:
        ClusterError: a server cannot be reached, or does not answer.
    """
    for server in (*servers, direct):
        await _warm_up(server, plan)
    rows: list[CoordinatorRow] = []
    traced: list[TracedRow] = []
    for chats in plan.cases:
        pairs: dict[str, list[tuple[LoadRound, LoadRound]]] = {}  # by server: through it, directly
        for number in range(plan.rounds):
            for server in servers if number % 2 == 0 else reversed(servers):
                tell(f"{chats}, {server.name}, round {number + 1} of {plan.rounds}")
                load = ChatLoad(chats, plan.duration_s, plan.drain_s, number)
                pair = (await load.run(server), await load.run(direct))
                pairs.setdefault(server.name, []).append(pair)
        rows += [coordinator_row(chats, server.name, pairs[server.name]) for server in servers]
        if TRACED in pairs:
            plain, with_traces = ([through for through, _ in pairs[n]] for n in (PLAIN, TRACED))
            traced.append(traced_row(chats, plain, with_traces))
    return CoordinatorReport(rows, traced)


async def _warm_up(server: MeasuredServer, plan: CoordinatorPlan) -> None:
    """Send a warm-up load. Raises ClusterError: it does not serve."""
    served = await ChatLoad(_WARM_UP, _WARM_UP_S, plan.drain_s, 0).run(server)
    broken = next((outcome for outcome in served.outcomes if outcome.end != "finished"), None)
    if broken is not None:
        raise ClusterError(f"{server.name} at {server.target.url} did not serve: {broken.error}")


class AddedTtft(msgspec.Struct, frozen=True):
    """How much the coordinator adds to TTFT percentiles, in milliseconds."""

    p50: float | None
    p99: float | None

    @classmethod
    def of(cls, through: Percentiles, direct: Percentiles) -> AddedTtft:
        """Subtract percentiles; None where there was no token."""
        return cls(_less(through.p50, direct.p50), _less(through.p99, direct.p99))


def _less(through: float | None, direct: float | None) -> float | None:
    return None if through is None or direct is None else through - direct


class CoordinatorRow(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one server under one load, all rounds together."""

    server: str
    output_tokens: int  # per answer
    concurrency: int  # streams of a closed loop; 0: open loop
    rate: float  # of an open loop
    requests_per_s: float
    tokens_per_s: float
    core_share: float | None  # CPU share of its process, in cores; None: not known
    starved_share: float | None  # share of the time in which it was runnable without a core
    requests_per_core_s: float | None  # per CPU second of it
    tokens_per_core_s: float | None
    tokens_per_event: float  # above 1: it was busy, and combined tokens
    ttft_ms: Percentiles
    direct_ttft_ms: Percentiles  # the same load, directly
    added_ttft_ms: AddedTtft
    client_late_ms: Percentiles  # lag in sending
    beside_share: float  # CPU share of the client and the simulated server or nodes, in cores
    direct_tokens_per_s: float
    sent: int
    failed: int  # or refused
    errors: dict[str, int]  # error |-> count


class TracedRow(msgspec.Struct, frozen=True, kw_only=True):
    """What traces cost under one load: CPU time of a request with them, divided by that without.

    Each round compares two neighbours in time; one in which either did nothing is left out.
    """

    output_tokens: int
    concurrency: int
    rate: float
    ratios: list[float]  # of each round
    median: float | None  # None: of no round


class CoordinatorReport(msgspec.Struct, frozen=True):
    """The results of `pdserve bench coordinator`."""

    rows: list[CoordinatorRow]
    traced: list[TracedRow] = []


def traced_row(
    chats: Chats, plain: Sequence[LoadRound], with_traces: Sequence[LoadRound]
) -> TracedRow:
    """Compare the rounds of two coordinators."""
    ratios = [
        (traced.cpu_s / traced.num_requests) / (other.cpu_s / other.num_requests)
        for other, traced in zip(plain, with_traces, strict=True)
        if min(other.cpu_s, other.num_requests, traced.cpu_s, traced.num_requests) > 0
    ]
    return TracedRow(
        output_tokens=chats.output_tokens,
        concurrency=chats.load.concurrency,
        rate=chats.load.rate,
        ratios=ratios,
        median=median(ratios) if ratios else None,
    )


def coordinator_row(
    chats: Chats, server: str, rounds: Sequence[tuple[LoadRound, LoadRound]]
) -> CoordinatorRow:
    """Make the row of a load from its rounds, each through the server and directly."""
    through, direct = [pair[0] for pair in rounds], [pair[1] for pair in rounds]
    outcomes = _outcomes(through)
    seconds = sum(some.seconds for some in through)
    cpu_s = sum(some.cpu_s for some in through)
    num_requests = sum(some.num_requests for some in through)
    num_tokens = sum(some.num_tokens for some in through)
    ttft_ms, direct_ttft_ms = _ttft_ms(outcomes), _ttft_ms(_outcomes(direct))
    return CoordinatorRow(
        server=server,
        output_tokens=chats.output_tokens,
        concurrency=chats.load.concurrency,
        rate=chats.load.rate,
        requests_per_s=num_requests / seconds,
        tokens_per_s=num_tokens / seconds,
        core_share=cpu_s / seconds if cpu_s else None,
        starved_share=sum(some.starved_s for some in through) / seconds if cpu_s else None,
        requests_per_core_s=num_requests / cpu_s if cpu_s else None,
        tokens_per_core_s=num_tokens / cpu_s if cpu_s else None,
        tokens_per_event=sum(outcome.num_received for outcome in outcomes)
        / max(1, sum(len(outcome.arrivals_s) for outcome in outcomes)),
        ttft_ms=ttft_ms,
        direct_ttft_ms=direct_ttft_ms,
        added_ttft_ms=AddedTtft.of(ttft_ms, direct_ttft_ms),
        client_late_ms=Percentiles.of([outcome.late_s for outcome in outcomes]),
        beside_share=sum(some.beside_s for some in through) / seconds,
        direct_tokens_per_s=sum(some.num_tokens for some in direct)
        / sum(some.seconds for some in direct),
        sent=len(outcomes),
        failed=sum(outcome.end != "finished" for outcome in outcomes),
        errors=dict(Counter(outcome.error for outcome in outcomes if outcome.error)),
    )


def _outcomes(rounds: Sequence[LoadRound]) -> list[Outcome]:
    return [outcome for some in rounds for outcome in some.outcomes]


def _ttft_ms(outcomes: Sequence[Outcome]) -> Percentiles:
    return Percentiles.of([outcome.ttft_s for outcome in outcomes])
