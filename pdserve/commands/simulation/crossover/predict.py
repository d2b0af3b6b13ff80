"""What is predicted of a cell: the goodput of each mode, the best ratio, and where modes cross."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import msgspec

from pdserve.commands.bench.compare.goodput import Goodput
from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.bench.load.scenarios import ScenarioName
from pdserve.commands.simulation.crossover.bands import Band, Curve, bands, curve_of
from pdserve.commands.simulation.crossover.config import MODES, CrossoverPlan
from pdserve.commands.simulation.plan.knee import Knee, knee_of
from pdserve.commands.simulation.predict.answer import promise_of
from pdserve.commands.simulation.predict.config import PredictConfig
from pdserve.commands.simulation.predict.deployment import Deployment, Result, Rig, run
from pdserve.commands.simulation.predict.goodput import find_goodput, pooled
from pdserve.commands.simulation.predict.load import Question, Ranged, capacity
from pdserve.measured.calibration import Calibration, Drafts, HeldOutErrors
from pdserve.measured.perf_model import PerfModel
from pdserve.settings.config import ONE_POOL, Mode, PolicyConfig

TARGET = 0.9
STREAMS = 8
_TIMES_TTFT = 3  # over which the requests of a run come at least


class Tried(msgspec.Struct, frozen=True):
    """A deployment and its goodput, predicted or measured."""

    deployment: Deployment
    goodput: Goodput
    curve: Curve

    @property
    def text(self) -> str:
        """The goodput for people: "3.2", or on which side of the rates it must be."""
        if self.goodput.where == "below the rates":
            return f"< {self.curve[0][0]:.3g}"
        return self.goodput.text


class Sized(msgspec.Struct, frozen=True):
    """All that was tried with so many nodes."""

    nodes: int
    tried: list[Tried]

    def of(self, mode: Mode) -> list[Tried]:
        """Return those of a mode, best first."""
        some = (one for one in self.tried if one.deployment.mode == mode)
        return sorted(some, key=lambda one: -one.goodput.rate)

    @property
    def best_of_modes(self) -> list[Tried]:
        """The best deployment of each mode, best first."""
        firsts = [of_mode[0] for mode in MODES if (of_mode := self.of(mode))]
        return sorted(firsts, key=lambda one: -one.goodput.rate)

    @property
    def bands(self) -> list[Band]:
        """Where the modes cross, each with its best ratio."""
        return bands({one.deployment.mode: one.curve for one in self.best_of_modes})


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """The predictions of one cell."""

    errors: HeldOutErrors
    drafts_right: float
    decode_ms: float  # a step of `STREAMS` streams of mean length
    prompt_ms: float  # the mean prompt, alone
    here: Sized  # nodes of one host, this one
    sizes: list[Sized]  # nodes with hosts of their own
    outside: dict[str, tuple[int, int]]  # what was not calibrated |-> least and most of it


def baseline_promise(
    calibration: Calibration, scenario: ScenarioName, plan: CrossoverPlan
) -> Promise:
    """Return the promise for all cells: multiples of idle latencies, as bench compare has them.

    Raises:
        PdserveError: the requests do not fit the model.
    """
    predictor = Predictor(calibration, 0.0, scenario, plan, Promise(1.0, 1.0))
    rig, case = predictor.rig(one_host=True), predictor.question.case(calibration, 0)
    pairs = [Deployment("disaggregated", 1, 1), Deployment("colocated", 0, 2)]
    return promise_of(PredictConfig(), rig, case, pairs)


def predicted(
    calibration: Calibration, drafts_right: float, scenario: ScenarioName, plan: CrossoverPlan,
    promise: Promise,
) -> Predicted:  # fmt: skip
    """Predict a cell. Raises PdserveError: the requests do not fit the model."""
    predictor = Predictor(calibration, drafts_right, scenario, plan, promise)
    here = predictor.sized(plan.here, one_host=True)
    sizes = [predictor.sized(nodes, one_host=False) for nodes in plan.sizes]
    return Predicted(
        errors=calibration.errors,
        drafts_right=drafts_right,
        decode_ms=1e3 * predictor.decode_s(),
        prompt_ms=1e3 / predictor.knee.prefill_per_s,
        here=here,
        sizes=sizes,
        outside=predictor.ranges.outside,
    )


class Predictor:
    """Simulates deployments of the nodes of one cell."""

    def __init__(
        self, calibration: Calibration, drafts_right: float, scenario: ScenarioName,
        plan: CrossoverPlan, promise: Promise,
    ) -> None:  # fmt: skip
        self._calibration = msgspec.structs.replace(
            calibration, drafts=Drafts(1.0 if drafts_right else 0.0, drafts_right)
        )
        self._plan = plan
        self._promise = promise
        self.question = Question("", scenario, plan.length_scale, plan.requests)
        self.ranges = Ranged(calibration, extrapolates=True)

    def rig(self, *, one_host: bool) -> Rig:
        """Return what all simulations have in common."""
        return Rig(
            calibration=self._calibration,
            policy=PolicyConfig(),
            ranges=self.ranges,
            one_host=one_host,
            admission=False,
            target=TARGET,
            lengths_told=True,
        )

    @cached_property
    def knee(self) -> Knee:
        """What one node can do at most."""
        case = self.question.case(self._calibration, 0)
        return knee_of(self.rig(one_host=False), case, self._promise, self._plan.requests)

    def decode_s(self) -> float:
        """Return the time of a step of `STREAMS` streams, each in the middle of its answer."""
        context = self.knee.mean_prompt + self.knee.mean_output / 2
        return PerfModel(self._calibration.decode).decode_s(STREAMS, round(STREAMS * context))

    def sized(self, nodes: int, *, one_host: bool) -> Sized:
        """Try the modes with so many nodes, and of two pools the ratios around the best one."""
        rig = self.rig(one_host=one_host)
        split = self._climbed(rig, "disaggregated", nodes, self._balanced(nodes))
        best = max(split, key=lambda one: one.goodput.rate).deployment.prefill
        tried = split
        for mode in MODES:
            if mode == "colocated":
                tried.append(self._tried(rig, Deployment(mode, 0, nodes)))
            elif mode in ONE_POOL:
                if nodes % 2 == 0:  # each node is one of both roles
                    tried.append(self._tried(rig, Deployment(mode, nodes // 2, nodes // 2)))
            elif mode != "disaggregated":
                if self._plan.climbs:
                    tried += self._climbed(rig, mode, nodes, best)
                else:
                    tried.append(self._tried(rig, Deployment(mode, best, nodes - best)))
        return Sized(nodes, tried)

    def _balanced(self, nodes: int) -> int:
        """Return about how many of the nodes prompts take, if steps were always full."""
        for_prompts, for_decodes = 1 / self.knee.prefill_per_s, 1 / self.knee.decode_per_s
        share = for_prompts / (for_prompts + for_decodes)
        return min(nodes - 1, max(1, round(nodes * share)))

    def _climbed(self, rig: Rig, mode: Mode, nodes: int, first: int) -> list[Tried]:
        def at(prefill: int) -> Tried:
            return self._tried(rig, Deployment(mode, prefill, nodes - prefill))

        return climbed(at, first, nodes - 1)

    def _tried(self, rig: Rig, deployment: Deployment) -> Tried:
        case = self.question.case(self._calibration, 0)

        def runs_at(rate: float) -> list[Result]:
            count = case.count_at(rate, self._plan.requests, _TIMES_TTFT * self._promise.ttft_s)
            return [run(rig, deployment, case, rate, count, self._promise, 0)]

        start = capacity(self._calibration, self.question, deployment.num_nodes) / 2
        found = find_goodput(runs_at, start, TARGET, self._plan.close)
        curve = curve_of(pooled(runs) for runs in found.runs)
        return Tried(deployment, found.goodput, curve)


def climbed(at: Callable[[int], Tried], first: int, last: int) -> list[Tried]:
    """Try numbers of prefill nodes, from `first` on, until those beside the best one are, too.

    Args:
        at: tries one.
        first: of them.
        last: the largest; the least is 1.
    """
    found: dict[int, Tried] = {}
    best = first
    while True:
        middle = best
        for prefill in range(max(1, middle - 1), min(last, middle + 1) + 1):
            if prefill not in found:
                found[prefill] = at(prefill)
        best = max(found, key=lambda prefill: found[prefill].goodput.rate)
        if best == middle:
            return [found[prefill] for prefill in sorted(found)]
