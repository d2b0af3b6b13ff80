"""Is adaptive mode within 5 % of the better of the two modes that it chooses between?

    python -m tests.simulation.adaptive_margin --traces azure.csv mooncake.jsonl

For each load and each shape of a cluster, the three modes' goodputs are simulated with one seed
after the other, until the interval of the ratio (adaptive over the better one) says so, or not.
What ends it is looked at after every seed, so the interval is one that may be looked at often.
With `--near 2`, which takes a quarter of the time, it is only asked how many requests are in time
in adaptive mode at 0.95 of the better mode's goodput, with two seeds: nine of ten, or not.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import fmean, stdev
from typing import Final, NamedTuple, get_args
from unittest.mock import patch

from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.bench.load.scenarios import ScenarioName
from pdserve.commands.simulation.predict.answer import load_calibration, promise_of
from pdserve.commands.simulation.predict.config import PredictConfig
from pdserve.commands.simulation.predict.deployment import Deployment, Result, Rig, run
from pdserve.commands.simulation.predict.goodput import find_goodput, pooled
from pdserve.commands.simulation.predict.load import Question, Ranged, capacity
from pdserve.settings.config import Mode, PolicyConfig

MARGIN: Final = 0.95
OTHERS: Final[tuple[Mode, ...]] = ("disaggregated", "colocated")
MODES: Final[tuple[Mode, ...]] = (*OTHERS, "adaptive")
REQUESTS: Final = 260  # of a run, at least
RUN_S: Final = 20.0  # of arrivals, at least: many times what a request takes
SEEDS: Final = 3, 8  # at least, and at most
START: Final = 16  # share of the capacity by arithmetic: runs below a goodput are cheaper
CLOSE: Final = 1.05  # factor between the two rates around a goodput
# Student's t at 99 %, by the number of seeds: with a handful of looks, at most one answer in 20 is
# wrong (Pocock, 1977).
T99: Final = {3: 9.92, 4: 5.84, 5: 4.60, 6: 4.03, 7: 3.71, 8: 3.50}


class Shape(NamedTuple):
    """A cluster."""

    calibration: str
    one_host: bool
    prefill: int
    decode: int


SHAPES: Final = [
    Shape("a100-13b", one_host=False, prefill=1, decode=1),
    Shape("a100-13b", one_host=False, prefill=1, decode=3),
    Shape("core-53m", one_host=True, prefill=1, decode=1),
]


@dataclass
class Case:
    """One load on one shape."""

    name: str
    question: Question
    shape: Shape

    def __post_init__(self) -> None:
        calibration = load_calibration(self.shape.calibration)
        self.rig = Rig(
            calibration=calibration,
            policy=PolicyConfig(),
            ranges=Ranged(calibration, extrapolates=True),
            one_host=self.shape.one_host,
            admission=False,
            target=0.9,
        )
        self.promise: Promise = promise_of(
            PredictConfig(), self.rig, self.question.case(calibration, 0), [*map(self.of, MODES)]
        )
        self.starts: dict[Mode, float] = {}

    def of(self, mode: Mode) -> Deployment:
        return Deployment(mode, self.shape.prefill, self.shape.decode)

    def goodput(self, mode: Mode, seed: int) -> float:
        """Requests/s at which nine of ten of each kind keep the promise."""

        def runs_at(rate: float) -> list[Result]:
            return [self.run(mode, rate, seed)]

        number = self.shape.prefill + self.shape.decode
        most = capacity(self.rig.calibration, self.question, number)
        start = self.starts.get(mode) or most / START
        found = find_goodput(runs_at, start, self.rig.target, CLOSE).goodput.rate
        self.starts[mode] = found or start / START
        return found

    def run(self, mode: Mode, rate: float, seed: int) -> Result:
        case = self.question.case(self.rig.calibration, seed)
        count = case.count_at(rate, self.question.count, RUN_S)
        # All rates and modes have the same requests, so that modes are all that differs.
        with patch("pdserve.commands.simulation.predict.load.turn_at", return_value=seed):
            return run(self.rig, self.of(mode), case, rate, count, self.promise, seed)


class Told(NamedTuple):
    """What the seeds say of a case."""

    better: Mode
    ratio: float  # adaptive over the better mode
    low: float
    high: float
    seeds: int

    @property
    def verdict(self) -> str:
        if self.low >= MARGIN:
            return "kept"
        return "lost" if self.high < MARGIN else "open"


def told(goodputs: Sequence[dict[Mode, float]]) -> Told:
    means = {mode: fmean(log(of[mode]) for of in goodputs) for mode in MODES}
    better = max(OTHERS, key=lambda mode: means[mode])
    ratios = [log(of["adaptive"] / of[better]) for of in goodputs]
    half = T99[len(ratios)] * stdev(ratios) / len(ratios) ** 0.5
    middle = fmean(ratios)
    return Told(better, exp(middle), exp(middle - half), exp(middle + half), len(ratios))


def measured(case: Case) -> Told:
    """Simulate seed after seed until it is decided."""
    goodputs: list[dict[Mode, float]] = []
    for seed in range(SEEDS[1]):
        goodputs.append({mode: case.goodput(mode, seed) for mode in MODES})
        if len(goodputs) >= SEEDS[0] and (found := told(goodputs)).verdict != "open":
            break
    return found


def near(case: Case, num_seeds: int) -> str:
    """Return what is in time in adaptive mode where the better mode has 1 / MARGIN to spare."""
    goodputs = [{mode: case.goodput(mode, seed) for mode in OTHERS} for seed in range(num_seeds)]
    better = max(OTHERS, key=lambda mode: fmean(log(of[mode]) for of in goodputs))
    runs = [case.run("adaptive", MARGIN * of[better], seed) for seed, of in enumerate(goodputs)]
    shares = " ".join(f"{pooled([result]).attainment:.3f}" for result in runs)
    return f"{shares} in time at {MARGIN} of {better}"


def loads(traces: Sequence[Path]) -> Iterator[tuple[str, Question]]:
    for name in get_args(ScenarioName):
        yield name, Question("", name, 0.0, REQUESTS)
    for trace in traces:
        yield trace.stem, Question(str(trace), "chats", 0.0, REQUESTS)


def main() -> None:
    """Print a line for each case, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, nargs="*", default=[], help="of requests, as well")
    parser.add_argument("--only", default="", help="loads with this in their names")
    parser.add_argument("--near", type=int, default=0, help="seeds of the short question")
    options = parser.parse_args()
    verdicts: Counter[str] = Counter()
    for name, question in loads(options.traces):
        for shape in SHAPES if options.only in name else ():
            case = Case(name, question, shape)
            where = f"{shape.calibration} {shape.prefill}P{shape.decode}D"
            if options.near:
                print(f"{name:22} {where:14} {near(case, options.near)}", flush=True)  # noqa: T201
                continue
            found = measured(case)
            verdicts[found.verdict] += 1
            figures = f"{found.ratio:.2f} ({found.low:.2f} to {found.high:.2f})"
            print(  # noqa: T201
                f"{name:22} {where:14} {found.verdict} {figures} of {found.better}, "
                f"{found.seeds} seeds",
                flush=True,
            )
    if verdicts:
        print(dict(verdicts))  # noqa: T201


if __name__ == "__main__":
    main()
