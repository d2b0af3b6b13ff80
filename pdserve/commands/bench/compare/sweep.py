"""One scenario: tunes the co-located mode, measures interference, and ascends the rates."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from math import sqrt

from pdserve.commands.bench.compare.answers import Answers
from pdserve.commands.bench.compare.cases import CompareCase
from pdserve.commands.bench.compare.config import COLOCATED, Tuning
from pdserve.commands.bench.compare.goodput import RatePoint
from pdserve.commands.bench.compare.interference import Interference
from pdserve.commands.bench.compare.rates import GROWTH, NEAR, Bracket, next_rate
from pdserve.commands.bench.compare.report import RateRow, Trial, Unloaded
from pdserve.commands.bench.compare.runner import Candidate, CandidateRunner, Experiment, rate_row
from pdserve.commands.bench.compare.shown.verdict import dispersion
from pdserve.commands.bench.load.outcome import Outcome, Promise
from pdserve.commands.bench.load.slo_score import score
from pdserve.shared.errors import ClusterError

_START = 0.6  # first rate, as a share of the best mode's capacity
_TUNING = 0.7  # rate at which tunings are tried, as a share of it
_CERTAIN = 1.15  # ratio of the ends of an interval of goodput that needs no further runs
_PROBING = 0.35  # most of the time that the search for the crossings may take
_PROBED = 24  # least number of requests of a short run,
_PROBE_TTFTS = 3.0  # and its duration in promised TTFTs, if a whole run is not shorter
_PROBE_TURNS = 500  # from which on turns are theirs
_RATE_DIGITS = 3
_ENOUGH = "what another run could tell is not worth its time"  # why it ends


@dataclass(slots=True)
class SweepResult:
    """The results of a scenario, without modes that failed."""

    tuning: Tuning  # of the co-located mode
    trials: list[Trial] = field(default_factory=list)
    interference: dict[str, Interference] = field(default_factory=dict)
    rows: dict[str, list[RateRow]] = field(default_factory=dict)
    again: dict[str, list[RateRow]] = field(default_factory=dict)  # of one of them, beside itself
    turns: dict[float, int] = field(default_factory=dict)  # rate |-> that of its first requests
    answers: Answers = field(default_factory=Answers)
    stopped: str = "interrupted"  # why there are no more rates

    @property
    def points(self) -> list[list[RatePoint]]:
        """All runs of each mode."""
        return [
            [row.point for row in rows + self.again.get(mode, [])]
            for mode, rows in self.rows.items()
        ]

    def drop(self, mode: str) -> None:
        """Remove a mode that failed: its earlier results are not a valid basis."""
        self.interference.pop(mode, None)
        self.rows.pop(mode, None)
        self.again.pop(mode, None)


class Sweep:
    """All modes on one case, with the same latency targets."""

    def __init__(
        self,
        experiment: Experiment,
        case: CompareCase,
        promise: Promise,
        idle: dict[str, Unloaded],
    ) -> None:
        self._experiment = experiment
        self._plan = experiment.plan
        self._case = case
        self._promise = promise
        self._idle = idle
        self._takes = max(unloaded.burst_per_s for unloaded in idle.values())
        self._near = 0.0  # a rate in the middle of the crossings; 0: not known

    async def run(self, result: SweepResult, until_s: float) -> None:
        """Measure, into `result`; do not begin a rate that would not be done by `until_s`."""
        await self._tune(result.trials)
        best = min(result.trials, key=lambda trial: trial.merit, default=None)
        if best is not None:
            result.tuning = best.tuning
        candidates = [
            Candidate(mode, result.tuning if mode == COLOCATED else None) for mode in self._idle
        ]
        await self._disturb(candidates, result)
        async with AsyncExitStack() as running:
            runners: dict[str, CandidateRunner] = {}
            for candidate in candidates:
                mode = candidate.mode
                try:
                    launched = self._experiment.launch(candidate, self._promise)
                    server = await running.enter_async_context(launched)
                    runners[mode] = await self._experiment.begin(server, candidate, self._case)
                except ClusterError as error:
                    self._experiment.fail(mode, error)
            await self._measure_rates(runners, result, until_s)

    async def _tune(self, trials: list[Trial]) -> None:
        """Try every tuning at the same rate, each in a cluster of its own."""
        tunings = self._plan.tunings
        if COLOCATED not in self._idle or len(tunings) == 1:
            return
        rate = round(self._takes * _TUNING, _RATE_DIGITS)
        requests, _ = self._experiment.requests_at(self._case, rate)
        for tuning in tunings:
            self._tell(f"{COLOCATED}, {tuning.text}, at {rate:g}/s")
            candidate = Candidate(COLOCATED, tuning)
            try:
                async with self._experiment.launch(candidate, self._promise) as server:
                    runner = await self._experiment.begin(server, candidate, self._case)
                    run = await runner.at_rate("tuning", requests, rate, self._promise)
            except ClusterError as error:
                self._experiment.fail(f"{COLOCATED}, {tuning.text}", error)
            else:
                scored = score(run.outcomes, self._promise, self._plan.target)
                trials.append(Trial(tuning, rate, scored))

    async def _disturb(self, candidates: list[Candidate], result: SweepResult) -> None:
        """Measure interference; each mode has its own cluster, which must admit the prompts."""
        scenario = self._case.scenario
        if scenario is None or not scenario.disturbed_by or self._plan.is_quick:
            return
        for candidate in list(candidates):
            mode = candidate.mode
            self._tell(f"{mode}, streams disturbed by {scenario.disturbed_by}")
            patient = replace(candidate, refuses=False)
            try:
                async with self._experiment.launch(patient, self._promise) as server:
                    runner = await self._experiment.begin(server, patient, self._case)
                    result.interference[mode] = await runner.interference(scenario, self._plan.seed)
            except ClusterError as error:
                candidates.remove(candidate)
                self._experiment.fail(mode, error)

    async def _measure_rates(
        self, runners: dict[str, CandidateRunner], result: SweepResult, until_s: float
    ) -> None:
        """Measure every mode at every rate, the first one twice: A B C A, then backwards.

        The second time it has other requests: what differs is all that chance does. Of the modes,
        what changes from one minute to the next does as much to all of them.
        """
        result.rows = {mode: [] for mode in runners}
        result.again = {mode: [] for mode in list(runners)[:1]}
        longest_tail_s = 0.0  # of a run, after its last arrival
        if self._plan.is_quick and not self._plan.rates:
            left_s = until_s - self._experiment.clock.now()
            self._near = await self._probe(runners, result, until_s - (1 - _PROBING) * left_s)
        for number in count():
            if not runners:
                break
            rate = self._next_rate(number, result)
            if rate is None:
                is_given = bool(self._plan.rates)
                result.stopped = "all given rates are measured" if is_given else _ENOUGH
                return
            # Each rate has arrivals of its own, or one unlucky series would move the whole curve,
            # and no interval would show it. No prompt is sent twice: whoever keeps answers, or
            # ignores salts, gains nothing.
            turn = 2 * number + 1
            requests, duration_s = self._experiment.requests_at(self._case, rate, turn)
            others, _ = self._experiment.requests_at(self._case, rate, turn + 1)
            result.turns.setdefault(rate, turn)
            needs_s = (len(runners) + len(result.again)) * (duration_s + longest_tail_s)
            left_s = max(0.0, until_s - self._experiment.clock.now())
            if number and needs_s > left_s:
                result.stopped = f"no time for {rate:g}/s, which would take {needs_s:.0f} s"
                return
            order = [(mode, result.rows) for mode in runners]
            order += [(mode, result.again) for mode in result.again]
            said: dict[str, list[Outcome]] = {}
            for mode, rows in order if number % 2 == 0 else reversed(order):
                if mode not in runners:
                    continue  # it has just failed
                self._tell(f"{mode} at {rate:g}/s, {len(requests)} requests; {left_s:.0f} s left")
                began_s = self._experiment.clock.now()
                try:
                    beside = rows is result.again
                    run = await runners[mode].at_rate(
                        "rate",
                        others if beside else requests,
                        rate,
                        self._promise,
                        beside_itself=beside,
                    )
                except ClusterError as error:
                    del runners[mode]
                    result.drop(mode)
                    self._experiment.fail(mode, error)
                else:
                    target = self._plan.target
                    rows[mode].append(rate_row(run, self._idle[mode], self._promise, target))
                    if not beside:
                        said[mode] = run.outcomes
                tail_s = self._experiment.clock.now() - began_s - duration_s
                longest_tail_s = max(longest_tail_s, tail_s)
            result.answers.add(rate, said)
        result.stopped = "no mode is left"

    async def _probe(
        self, runners: dict[str, CandidateRunner], result: SweepResult, until_s: float
    ) -> float:
        """Return a rate in the middle of where the modes fail, by a short run at each of a few.

        A run lasts several times the promised TTFT, or a burst would pass that is no rate.
        """
        crossings: list[float] = []
        begin, number = self._takes * _START, count(_PROBE_TURNS)
        lasts_s = min(_PROBE_TTFTS * self._promise.ttft_s, self._plan.duration_s)
        for mode in list(runners):
            bracket = Bracket(begin)
            while (rate := bracket.next_rate()) and self._experiment.clock.now() < until_s:
                rate = round(rate, _RATE_DIGITS)
                size = self._case.count_at(rate, _PROBED, lasts_s)
                turn = next(number)
                requests = self._case.workload.timed(rate, size, turn, contents=turn)
                self._tell(f"{mode}, {len(requests)} requests at {rate:g}/s, to find its limit")
                try:
                    run = await runners[mode].at_rate("probe", requests, rate, self._promise)
                except ClusterError as error:
                    del runners[mode]
                    result.drop(mode)
                    self._experiment.fail(mode, error)
                    break
                scored = score(run.outcomes, self._promise, self._plan.target)
                bracket.add(rate, is_kept=scored.attainment >= self._plan.target)
            else:
                begin = bracket.middle
                crossings.append(begin)
        return sqrt(min(crossings) * max(crossings)) if crossings else begin

    def _next_rate(self, number: int, result: SweepResult) -> float | None:
        if self._plan.rates:
            return self._plan.rates[number] if number < len(self._plan.rates) else None
        points = result.points
        rate = next_rate(
            points,
            self._near or self._takes * _START,
            self._plan.target,
            _CERTAIN,
            dispersion(points),
            NEAR if self._near else GROWTH,
        )
        return None if rate is None else round(rate, _RATE_DIGITS)

    def _tell(self, text: str) -> None:
        self._experiment.tell(f"{self._case.name}: {text}")
