"""Multiplexed mode in the simulator: steps of both phases on shares of a node's cores."""

from __future__ import annotations

from functools import partial
from typing import cast

import msgspec
import pytest

from pdserve.commands.bench.compare.config import CompareConfig
from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.cli.main import main
from pdserve.commands.simulation.events import Events
from pdserve.commands.simulation.host import Host
from pdserve.commands.simulation.machine import Machine
from pdserve.commands.simulation.node import Node, World
from pdserve.commands.simulation.plan.config import PlanConfig
from pdserve.commands.simulation.predict.answer import load_calibration
from pdserve.commands.simulation.predict.deployment import (
    Deployment,
    Result,
    Rig,
    idle_latencies,
    run,
)
from pdserve.commands.simulation.predict.load import Question, Ranged
from pdserve.commands.simulation.simulate.config import SimulateConfig
from pdserve.commands.simulation.split import Phase, SplitCores, Took
from pdserve.commands.simulation.step_times import REGIONS
from pdserve.commands.simulation.validate.config import PredictionConfig
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.lifecycle import Lifecycle, Targets
from pdserve.measured.calibration import Calibration, Residuals, Services, ServiceTimes, Sharing
from pdserve.measured.perf_model import StepShape
from pdserve.protocol import NodeRole, Prompt, SamplingParams
from pdserve.settings.config import PolicyConfig
from pdserve.shared.errors import ConfigError

CORE = msgspec.structs.replace(load_calibration("core-53m"), residuals=Residuals())
P: Phase = "prefill"
D: Phase = "decode"
PROMPT, DECODE = StepShape(100, 1, 5050, 0), StepShape(1, 1, 0, 100)
HOURS_S = 1e4
NUM = 20  # requests of a run


class Cores:
    """Cores on which a test begins steps; what each took is kept."""

    def __init__(self, threads: int = 1, decode_beside_decode: float = 1.6) -> None:
        self.events = Events()
        bus = Sharing(decode_beside_decode=decode_beside_decode)
        machine = Machine.of(CORE)
        host = Host("host", self.events)
        for phase in (P, D):
            host.join(phase, "node")
        self.cores = SplitCores(self.events, host, machine, threads, bus, PolicyConfig())
        self.ends_s: dict[Phase, float] = {}
        self.took: dict[Phase, Took] = {}

    def begin(self, phase: Phase, seconds: float, tpot_s: float = HOURS_S) -> None:
        """Begin a step that would take so long on half of the cores."""
        request = Request(
            "r", Prompt([1] * 100), SamplingParams(max_tokens=9), Lifecycle(0.0, first_token_s=0.0),
            output_token_ids=[1], num_computed_tokens=100, targets=Targets(tpot_s=tpot_s),
        )  # fmt: skip
        shape = PROMPT if phase == P else DECODE
        rows = [Scheduled(request, 1)]
        self.cores.begin(phase, phase, rows, shape, seconds, partial(self._ended, phase))

    def _ended(self, phase: Phase, took: Took) -> None:
        self.ends_s[phase], self.took[phase] = self.events.now_s, took


def test_alone_a_prompt_has_all_cores_and_a_decode_what_the_bus_gives() -> None:
    split = Cores(decode_beside_decode=1.6)
    split.begin(P, 1.0)
    split.events.run()
    assert split.ends_s[P] == pytest.approx(0.5)
    split.cores.release(P)
    split.begin(D, 1.0)
    split.events.run()
    assert split.took[D].seconds == pytest.approx(1.6 / 2)


def test_a_step_goes_on_with_the_cores_that_the_other_one_leaves() -> None:
    split = Cores()
    split.begin(P, 1.0)
    split.events.at(0.2, lambda: split.begin(D, 0.1))  # 0.6 are left, and now at half the speed
    split.events.at(0.4, partial(split.cores.release, D))  # 0.4 are left
    split.events.run()
    assert split.ends_s == {D: pytest.approx(0.3), P: pytest.approx(0.6)}
    assert split.took[D] == Took(pytest.approx(0.1), 1.0, 0.5)
    assert split.took[P].seconds == pytest.approx(0.6)
    assert split.took[P].share == pytest.approx((2 * 0.2 + 0.2 + 2 * 0.2) / 0.6 / 2)


def test_between_two_steps_a_node_keeps_its_cores() -> None:
    split = Cores()
    split.begin(P, 1.0)
    split.begin(D, 0.1)
    split.events.run(until_s=0.5)
    assert D in split.ends_s
    assert split.cores.allowed(P) == 1
    split.events.run()
    assert split.ends_s[P] == pytest.approx(1.0)


def test_decodes_get_what_their_tpot_needs_and_prompts_the_rest() -> None:
    alone_s = Machine.of(CORE).perf().step_s(DECODE)  # on 4 of 8 cores
    for tpot_s, cores in ((2 * alone_s, 3), (HOURS_S, 1), (alone_s / 10, 7)):
        split = Cores(threads=4)
        split.begin(P, 1.0)
        split.begin(D, 0.1, tpot_s)
        assert split.cores.allowed(D) == cores
        assert split.cores.allowed(P) == 8 - cores


class OneTokenEach:
    """The world of a node whose requests get one token."""

    def next_token(self, request: Request) -> SampledToken:
        return SampledToken(7)

    def step_done(self, *_: object) -> None:
        pass


def test_a_prompt_that_came_back_and_lacks_one_token_is_no_decode() -> None:
    """Its step has the shape of one. What nodes know of decodes, and what they cost, is not of it.

    As on live nodes.
    """
    events, machine = Events(), Machine.of(CORE)
    host = Host("host", events)
    cores = SplitCores(events, host, machine, 1, Sharing(), PolicyConfig())
    node = Node("d", NodeRole.DECODE, machine, events, PolicyConfig(), host=host, cores=cores)
    node.world = cast("World", OneTokenEach())
    decode_ratio, prompt = node.perf.decode_ratio, list(range(machine.block_size))
    for outputs in ([], [5]):
        sampling = SamplingParams(max_tokens=len(outputs) + 1)
        node.submit(
            Request("r", Prompt(prompt), sampling, Lifecycle(0.0), output_token_ids=outputs)
        )
        events.run()
    node.check_idle()
    assert [node.steps[region].count for region in REGIONS] == [1, 1, 0], "of a decode's shape"
    assert node.busy_s > 0
    assert node.prompt_s == pytest.approx(node.busy_s)
    assert (node.largest_batch, node.perf.decode_ratio) == (0, decode_ratio)


# ---- clusters ------------------------------------------------------------------------------------


def rig(calibration: Calibration) -> Rig:
    return Rig(
        calibration=calibration,
        policy=PolicyConfig(),
        ranges=Ranged(calibration, extrapolates=True),
        one_host=True,
        admission=False,
        target=0.0,
    )


def simulated(mode: str, scenario: str, rate: float, calibration: Calibration = CORE) -> Result:
    question = Question("", scenario, 0.0, NUM)  # type: ignore[arg-type]
    deployment = Deployment(mode, 1, 1)  # type: ignore[arg-type]
    case, asked = question.case(calibration, 0), rig(calibration)
    return run(asked, deployment, case, rate, NUM, Promise(2.0, 0.02), 0)


def test_it_is_faster_than_two_halves_where_one_of_them_would_idle() -> None:
    shared, halves = (simulated(m, "long-prompts", 0.2) for m in ("multiplexed", "disaggregated"))
    assert shared.mean_e2e_s < 0.9 * halves.mean_e2e_s
    assert shared.score.finished == halves.score.finished == shared.score.sent
    assert shared.output_tokens == halves.output_tokens


def test_what_is_in_front_takes_time_of_a_node_also_where_one_phase_computes_alone() -> None:
    question = Question("", "conversation", 0.0, NUM)
    tpots_s = []
    for token_s in (0.0, 0.001):
        of_each = ServiceTimes(token_s=token_s)
        services = Services(coordinator=of_each, client=of_each)
        calibration = msgspec.structs.replace(CORE, host=Sharing(cores=2), services=services)
        case = question.case(calibration, 0)
        found = idle_latencies(rig(calibration), Deployment("multiplexed", 1, 1), case, 5, 0)
        tpots_s.append(found[1])
    assert tpots_s[1] == pytest.approx(tpots_s[0] + 0.002 / 2, rel=0.1)  # its cores make time


@pytest.mark.long
def test_a_run_can_be_repeated() -> None:
    once, again = (simulated("multiplexed", "conversation", 2.0) for _ in range(2))
    assert once.score == again.score


def test_other_numbers_of_prefill_than_of_decode_nodes_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ConfigError, match="as many of each"):
        SimulateConfig(modes=["multiplexed"], prefill=2).check()
    with pytest.raises(ConfigError, match="as many of each"):
        _ = CompareConfig(modes=["multiplexed"], decode=2).plan
    with pytest.raises(ConfigError, match="as many of each"):
        PredictionConfig(deployments=["multiplexed:2P1D"]).check()
    assert PredictionConfig(deployments=["multiplexed:2P2D"]).check() == [("multiplexed", 2, 2)]
    with pytest.raises(ConfigError, match="twice as large as the one that was calibrated"):
        PlanConfig(modes=["multiplexed"]).check()
    assert main(["simulate", "--modes", "multiplexed", "--decode", "2"]) == 2
    assert "as many of each" in capsys.readouterr().err


@pytest.mark.long
def test_the_command_compares_it_with_other_modes(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--modes disaggregated,multiplexed --prefill 2 --decode 2 --rates 2 --requests 10"
    assert main(["simulate", *flags.split()]) == 0
    assert "multiplexed 2P2D" in capsys.readouterr().out
