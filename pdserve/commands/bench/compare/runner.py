"""The candidates of a comparison, and their measurements: idle, burst, at a rate, disturbed."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from pdserve.commands.bench.compare.cases import WARM_UP, CompareCase
from pdserve.commands.bench.compare.config import ComparePlan, Tuning
from pdserve.commands.bench.compare.interference import Interference, compare_itl, steady_requests
from pdserve.commands.bench.compare.report import RateRow, Unloaded
from pdserve.commands.bench.load.open_loop import OpenLoopClient, open_loop_client
from pdserve.commands.bench.load.outcome import Outcome, Percentiles, Promise
from pdserve.commands.bench.load.scenarios import Scenario
from pdserve.commands.bench.load.slo_score import score
from pdserve.commands.bench.load.workload import TimedRequest
from pdserve.shared.clock import Clock
from pdserve.shared.errors import ClusterError, PdserveError

_IDLE_S = 60.0  # deadline of one request to an idle cluster, or of a burst
_MARGIN_S = 1.0
WARM_UP_RUN = "warm-up"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A serving mode and its settings, or another server."""

    mode: str  # or the other server's name
    tuning: Tuning | None = None  # None: as configured
    refuses: bool = True  # whether it refuses requests that would miss their targets


class ModeServer(Protocol):
    """A running candidate."""

    @property
    def url(self) -> str:
        """The server's URL, as in "http://127.0.0.1:8000"."""
        ...

    @property
    def model(self) -> str:
        """The name of its model in requests."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        ...

    async def settle(self) -> None:
        """Wait until nothing is in flight.

        Raises:
            ClusterError: it takes too long, or the server is gone.
        """
        ...

    def pause(self) -> None:
        """It is not its turn: it may cost the others nothing."""
        ...

    def resume(self) -> None:
        """It is its turn."""
        ...


# Start a candidate with these latency targets (None: without any), and stop it at the end.
Launch = Callable[[Candidate, Promise | None], AbstractAsyncContextManager[ModeServer]]


class RunRecord(msgspec.Struct, frozen=True):
    """The full record of one run, which allows scoring it again."""

    what: str  # "rate", "tuning", "idle", "burst", "quiet", "disturbed", "probe", "warm-up"
    scenario: str
    mode: str
    tuning: Tuning | None
    rate: float | None
    outcomes: list[Outcome]
    beside_itself: bool = False  # it is the second run of its mode at this rate and turn (A/A)
    client_lag_p99_ms: float | None = None  # of a clock that ticks beside the client
    client_core_share: float = 0.0  # CPU share of the client, in cores
    turn: int = 0  # of the requests: runs of one rate and turn had the same ones


Keep = Callable[[RunRecord], None]


class CandidateRunner:
    """One running candidate in one scenario; the record of every run is kept."""

    def __init__(self, server: ModeServer, candidate: Candidate, scenario: str, keep: Keep) -> None:
        self.candidate = candidate
        self._server = server
        self._scenario = scenario
        self._keep = keep
        self._num_runs = 0
        self.warmed: Sequence[Outcome] = ()  # what it has answered to warm up

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[OpenLoopClient]:
        """A client of the server, which is awake meanwhile."""
        self._server.resume()
        try:
            async with open_loop_client(self._server.url, self._server.model) as client:
                yield client
            await self._server.settle()
        finally:
            self._server.pause()

    async def warm_up(self, requests: Sequence[TimedRequest]) -> None:
        """Send these at once, without counting them. Raises ClusterError as `settle`."""
        run = await self._run(WARM_UP_RUN, requests, _IDLE_S, asks_ids=True)
        self.warmed = run.outcomes

    async def unloaded(
        self, alone: Sequence[TimedRequest], together: Sequence[TimedRequest]
    ) -> Unloaded:
        """Send some requests one at a time, then others all at once.

        Raises:
            ClusterError: one of the first requests was not served, or none of the others.
        """
        async with self._turn() as client:
            outcomes = await client.one_by_one(alone, self._salt("idle"), _IDLE_S)
        self._keep(RunRecord("idle", *self._names, None, outcomes))
        burst = (await self._run("burst", together, _IDLE_S)).outcomes
        return unloaded_of(outcomes, burst)

    async def at_rate(
        self,
        what: str,
        requests: Sequence[TimedRequest],
        rate: float,
        promise: Promise,
        *,
        turn: int = 0,
        beside_itself: bool = False,
    ) -> RunRecord:
        """Run an open loop at this rate. Raises ClusterError as `settle`."""
        limit_s = drain_s(promise, requests)
        return await self._run(
            what, requests, limit_s, rate, turn=turn, beside_itself=beside_itself
        )

    async def interference(self, scenario: Scenario, seed: int) -> Interference:
        """Measure the scenario's streams without and with disturbance. Raises as `settle`."""
        runs = []
        for what, disturbed in (("quiet", False), ("disturbed", True)):
            requests = steady_requests(scenario, seed, disturbed=disturbed)
            # Streams that are delayed for long are what is measured here, so they may end late.
            run = await self._run(what, requests, _IDLE_S)
            runs.append(run.outcomes)
        return compare_itl(*runs)

    async def _run(
        self,
        what: str,
        requests: Sequence[TimedRequest],
        limit_s: float,
        rate: float | None = None,
        *,
        turn: int = 0,
        beside_itself: bool = False,
        asks_ids: bool = False,
    ) -> RunRecord:
        async with self._turn() as client:
            run = await client.run(requests, self._salt(what), limit_s, asks_ids=asks_ids)
            record = RunRecord(
                what,
                *self._names,
                rate,
                run.outcomes,
                beside_itself,
                Percentiles.of(run.lags_s).p99,
                run.core_share,
                turn,
            )
            self._keep(record)
        return record

    @property
    def _names(self) -> tuple[str, str, Tuning | None]:
        return self._scenario, self.candidate.mode, self.candidate.tuning

    def _salt(self, what: str) -> str:
        """Return a salt for one run, so that it shares no prefixes with other runs."""
        self._num_runs += 1
        return f"{self._scenario}-{what}-{self._num_runs}"


def drain_s(promise: Promise, requests: Sequence[TimedRequest]) -> float:
    """Return how long after the last arrival a request can still end in time."""
    longest = max((request.num_output for request in requests), default=0)
    return promise.ttft_s + promise.tpot_s * longest + _MARGIN_S


def unloaded_of(alone: Sequence[Outcome], burst: Sequence[Outcome]) -> Unloaded:
    """Make the figures of an idle cluster: of requests sent alone, and of others sent together.

    Raises:
        ClusterError: none of those sent together was served.
    """
    served = [outcome for outcome in burst if outcome.end == "finished"]
    if not served:
        raise ClusterError(
            f"an idle cluster served none of {len(burst)} simultaneous requests within "
            f"{_IDLE_S:g} s"
        )
    last_s = max(outcome.arrivals_s[-1] for outcome in served)
    return Unloaded(
        requests=len(alone),
        ttft_ms=Percentiles.of([outcome.ttft_s for outcome in alone]),
        tpot_ms=Percentiles.of([outcome.tpot_s for outcome in alone]),
        itl_ms=Percentiles.of([gap for outcome in alone for gap in outcome.gaps_s]),
        slowest_ttft_s=max(outcome.ttft_s for outcome in alone),
        median_tpot_s=float(np.median([outcome.tpot_s for outcome in alone])),
        burst_requests=len(burst),
        burst_per_s=len(served) / last_s,
    )


def rate_row(record: RunRecord, unloaded: Unloaded, promise: Promise, target: float) -> RateRow:
    """Make the table row of a run at a rate."""
    assert record.rate is not None
    scored = score(record.outcomes, promise, target)
    idle_p99, itl_p99 = unloaded.itl_ms.p99, scored.itl_ms.p99
    late_ms = max(scored.late_ms.p99 or 0.0, record.client_lag_p99_ms or 0.0)
    return RateRow(
        rate=record.rate,
        duration_s=len(record.outcomes) / record.rate,
        score=scored,
        client_kept_up=promise.is_measured(late_ms),
        client_lag_p99_ms=record.client_lag_p99_ms,
        client_core_share=record.client_core_share,
        itl_p99_vs_unloaded=itl_p99 / idle_p99 if itl_p99 is not None and idle_p99 else None,
        prefilled_on=dict(Counter(o.prefill_node for o in record.outcomes if o.prefill_node)),
        beside_itself=record.beside_itself,
    )


@dataclass(frozen=True, slots=True)
class Experiment:
    """The context in which a comparison runs."""

    plan: ComparePlan
    launch: Launch
    clock: Clock
    keep: Keep
    tell: Callable[[str], None]  # reports progress to the user
    failures: dict[str, str]  # mode |-> why it is missing

    async def begin(
        self, server: ModeServer, candidate: Candidate, case: CompareCase
    ) -> CandidateRunner:
        """Return a warmed-up candidate. Raises ClusterError: it is gone."""
        runner = CandidateRunner(server, candidate, case.name, self.keep)
        await runner.warm_up(case.workload.first(self.plan.warm_up, WARM_UP))
        return runner

    def fail(self, who: str, error: PdserveError) -> None:
        """Record a failure; the mode is left out from here on."""
        self.failures[who] = error.message
        self.tell(f"{who} is left out: {error.message}")

    def count_at(self, case: CompareCase, rate: float) -> int:
        """Return how many requests a run at this rate has: whole decks."""
        return case.count_at(rate, self.plan.least_requests, self.plan.duration_s)

    def requests_at(self, case: CompareCase, rate: float, turn: int = 0) -> list[TimedRequest]:
        """Return the requests at that rate; each turn has other arrivals, lengths and contents.

        In whole decks, so that each turn has the same mixture.
        """
        return case.workload.timed(rate, self.count_at(case, rate), turn, contents=turn)
