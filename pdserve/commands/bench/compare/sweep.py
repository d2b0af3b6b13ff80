"""One scenario: tunes the co-located mode, measures interference, and ascends the rates."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

from pdserve.commands.bench.compare.answers import Answers, run_at
from pdserve.commands.bench.compare.cases import CompareCase
from pdserve.commands.bench.compare.config import COLOCATED, Tuning
from pdserve.commands.bench.compare.goodput import Draws, RatePoint, bounded, crossing
from pdserve.commands.bench.compare.interference import Interference
from pdserve.commands.bench.compare.rates import next_rate
from pdserve.commands.bench.compare.report import RateRow, Trial, Unloaded
from pdserve.commands.bench.compare.runner import Candidate, CandidateRunner, Experiment, rate_row
from pdserve.commands.bench.compare.scales import Spread, drawn
from pdserve.commands.bench.compare.shown.verdict import Noise, Ratio, undecided
from pdserve.commands.bench.load.outcome import Outcome, Promise
from pdserve.commands.bench.load.slo_score import score
from pdserve.shared.errors import ClusterError

WARM_UP = (0.0, 0)  # as a rate and a turn
_START = 0.6  # first rate, as a share of the best mode's capacity
_TUNING = 0.7  # rate at which tunings are tried, as a share of it
_CERTAIN = 1.15  # ratio of the ends of an interval of goodput that needs no further runs
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
    # Rate and turn |-> mode |-> what it answered to the same requests.
    said: dict[tuple[float, int], dict[str, Sequence[Outcome]]] = field(default_factory=dict)
    stopped: str = "interrupted"  # why there are no more rates

    def runs(self, mode: str) -> list[RateRow]:
        """Return all runs of a mode."""
        return self.rows[mode] + self.again.get(mode, [])

    @property
    def answers(self) -> Answers:
        """Whether modes gave the same ones."""
        answers = Answers()
        for run, outcomes in self.said.items():
            answers.add("the warm-up" if run == WARM_UP else run_at(run[0]), outcomes)
        return answers

    @property
    def spread(self) -> Spread:
        """How much equal runs vary."""
        return Spread.of([row.scaled for row in self.runs(mode)] for mode in self.rows)

    def draws(self, seed: int) -> dict[str, Draws]:
        """Return what the goodput of each mode with runs may be."""
        return {
            mode: self._drawn(self.runs(mode), seed + number)
            for number, mode in enumerate(mode for mode, rows in self.rows.items() if rows)
        }

    def noise(self, seed: int) -> Noise | None:
        """Return the mode that was measured beside itself, beside itself."""
        for mode, runs in self.again.items():
            if runs and self.rows.get(mode):
                ratio = Ratio.of(self._drawn(self.rows[mode], seed), self._drawn(runs, seed + 1))
                return Noise(mode, ratio, self.spread.deviation)
        return None

    def _drawn(self, runs: Sequence[RateRow], seed: int) -> Draws:
        return drawn([run.scaled for run in runs], self.spread, seed)

    def drop(self, mode: str) -> None:
        """Remove a mode that failed: its earlier results are not a valid basis."""
        self.interference.pop(mode, None)
        self.rows.pop(mode, None)
        self.again.pop(mode, None)
        for outcomes in self.said.values():
            outcomes.pop(mode, None)


class _Run(NamedTuple):
    """A run of a mode; odd turns are the first ones of a round, even ones beside itself (A/A)."""

    mode: str
    rate: float
    turn: int  # of the requests: runs of one rate and turn have the same ones


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
            result.said[WARM_UP] = {mode: runner.warmed for mode, runner in runners.items()}
            await self._measure_rates(runners, result, until_s)

    async def _tune(self, trials: list[Trial]) -> None:
        """Try every tuning at the same rate, each in a cluster of its own."""
        tunings = self._plan.tunings
        if COLOCATED not in self._idle or len(tunings) == 1:
            return
        rate = round(self._takes * _TUNING, _RATE_DIGITS)
        requests = self._experiment.requests_at(self._case, rate)
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
        """Measure the modes in rounds, the first one twice: A B C A, then backwards.

        The second time it has other requests: what differs is all that chance does. Of the modes,
        what changes from one minute to the next does as much to all of them.
        """
        result.rows = {mode: [] for mode in runners}
        result.again = {mode: [] for mode in list(runners)[:1]}
        longest_tail_s = 0.0  # of a run, after its last arrival
        for number in count():
            if not runners:
                result.stopped = "no mode is left"
                return
            wanted = self._next_rates(number, result)
            if not wanted:
                is_given = bool(self._plan.rates)
                result.stopped = "all given rates are measured" if is_given else _ENOUGH
                return
            needs_s = {
                mode: (self._lasts_s(rate) + longest_tail_s) * (1 + (mode in result.again))
                for mode, rate in wanted.items()
            }
            rates = self._in_time(wanted, needs_s, until_s) if number else wanted
            if not rates:
                told = ", ".join(f"{rate:g}/s" for rate in sorted(set(wanted.values())))
                result.stopped = f"no time for {told}: at least {min(needs_s.values()):.0f} s"
                return
            # Each round has arrivals of its own, or one unlucky series would move the whole curve,
            # and no interval would show it. No prompt is sent twice: whoever keeps answers, or
            # ignores salts, gains nothing.
            turn = 2 * number + 1
            order = [_Run(mode, rates[mode], turn) for mode in runners if mode in rates]
            order += [_Run(mode, rates[mode], turn + 1) for mode in result.again if mode in rates]
            for run in order if number % 2 == 0 else reversed(order):
                if run.mode not in runners:
                    continue  # it has just failed
                left_s = max(0.0, until_s - self._experiment.clock.now())
                self._tell(f"{run.mode} at {run.rate:g}/s; {left_s:.0f} s left")
                began_s = self._experiment.clock.now()
                try:
                    await self._measure(runners[run.mode], run, result)
                except ClusterError as error:
                    del runners[run.mode]
                    result.drop(run.mode)
                    self._experiment.fail(run.mode, error)
                tail_s = self._experiment.clock.now() - began_s - self._lasts_s(run.rate)
                longest_tail_s = max(longest_tail_s, tail_s)

    async def _measure(self, runner: CandidateRunner, run: _Run, result: SweepResult) -> None:
        """Measure a mode at a rate, into `result`. Raises ClusterError as `settle`."""
        is_again = run.turn % 2 == 0
        requests = self._experiment.requests_at(self._case, run.rate, run.turn)
        if not is_again:
            result.turns.setdefault(run.rate, run.turn)
        record = await runner.at_rate(
            "rate", requests, run.rate, self._promise, turn=run.turn, beside_itself=is_again
        )
        rows = result.again if is_again else result.rows
        rows[run.mode].append(
            rate_row(record, self._idle[run.mode], self._promise, self._plan.target)
        )
        if not is_again:
            said = result.said.setdefault((run.rate, run.turn), {})
            said[run.mode] = record.outcomes

    def _lasts_s(self, rate: float) -> float:
        """Return how long the requests of a run at this rate arrive."""
        return self._experiment.count_at(self._case, rate) / rate

    def _in_time(
        self, rates: dict[str, float], needs_s: dict[str, float], until_s: float
    ) -> dict[str, float]:
        """Return the rates of a round for which there is time, the soonest done first.

        Given rates are measured of all modes, or of none.
        """
        left_s = until_s - self._experiment.clock.now()
        chosen = {}
        for mode in sorted(rates, key=needs_s.__getitem__):
            if needs_s[mode] <= left_s:
                chosen[mode] = rates[mode]
                left_s -= needs_s[mode]
        return {} if self._plan.rates and len(chosen) < len(rates) else chosen

    def _next_rates(self, number: int, result: SweepResult) -> dict[str, float]:
        """Return the rates of the next round, by mode, of those that are to be told apart.

        When these are, of the others, whose crossings are still looked for.
        """
        given = self._plan.rates
        if given:
            return dict.fromkeys(result.rows, given[number]) if number < len(given) else {}
        draws, noise = result.draws(self._plan.seed), result.noise(self._plan.seed)
        done = {*draws} - undecided(draws, noise) if len(draws) > 1 else set()
        rates: dict[bool, dict[str, float]] = {False: {}, True: {}}  # by whether it is done with
        for mode in result.rows:
            points, is_done = [run.point for run in result.runs(mode)], mode in done
            if is_done and crossing(points, self._plan.target)[1] == "crossing":
                continue
            rate = self._next_rate(points, self._idle[mode].burst_per_s, draws.get(mode))
            if rate:
                rates[is_done][mode] = round(rate, _RATE_DIGITS)
        return rates[False] or rates[True]

    def _next_rate(
        self, points: Sequence[RatePoint], takes: float, draws: Draws | None
    ) -> float | None:
        target, is_certain = self._plan.target, False
        if draws is not None:
            found = bounded(points, target, draws)
            is_certain = found.high is not None and found.high <= _CERTAIN * found.low
        return next_rate(points, self._takes * _START, takes, target, is_certain=is_certain)

    def _tell(self, text: str) -> None:
        self._experiment.tell(f"{self._case.name}: {text}")
