"""Two nodes that share their cores: what they ask for, and what becomes of it when one dies."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from pdserve.clock import ManualClock
from pdserve.cluster.core_files import CoreFiles
from pdserve.core_rule import Slowdowns
from pdserve.engine.interface import Sampled
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.ranks.hosts import WHOLE_NODE, HostShare
from pdserve.engine.ranks.sizes import Parallelism
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.steps.shape import shape_of
from pdserve.errors import ConfigError, RequestCancelled
from pdserve.lifecycle import Lifecycle, Targets
from pdserve.node.split_cores.demand import RestDemand, StreamDemand
from pdserve.node.split_cores.opening import open_pair
from pdserve.node.split_cores.pair import CorePair
from pdserve.node.split_cores.steps import SplitSteps
from pdserve.node.start.cores import CorePlan
from pdserve.node.start.model import NodeModel
from pdserve.perf_model import PerfModel, StepShape
from pdserve.protocol import NodeRole, SamplingParams, StepCosts
from pdserve.settings.config import NodeConfig

FOREVER_S = 1e5
P, D = NodeRole.PREFILL, NodeRole.DECODE

OTHER = """
import sys
from pdserve.node.split_cores.pair import CorePair
from pdserve.protocol import NodeRole
pair = CorePair(sys.argv[1], NodeRole.PREFILL, 4, lease_s=1e5)
pair.ask(1)
print("asked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path() -> Iterator[str]:
    files = CoreFiles(1)
    yield files.paths[0]
    files.close()


def test_a_pair_knows_each_other_by_its_memory(path: str) -> None:
    prefill, decode = CorePair(path, P, 4), CorePair(path, D, 4)
    decode.ask(3)
    assert [prefill.allowed, decode.allowed] == [1, 4]
    prefill.ask(1)
    assert [prefill.allowed, decode.allowed] == [1, 3]
    decode.release()
    assert [prefill.allowed, decode.allowed] == [4, 1]
    decode.ask(2)
    decode.close()
    decode.close()
    assert prefill.allowed == 4
    prefill.close()


def test_a_side_has_one_node_at_a_time(path: str) -> None:
    first = CorePair(path, D, 2)
    with pytest.raises(ConfigError, match="another decode node uses it already"):
        CorePair(path, D, 2)
    first.close()
    CorePair(path, D, 2).close()


def test_what_a_former_node_asked_for_is_forgotten(path: str) -> None:
    former, decode = CorePair(path, P, 4, FOREVER_S), CorePair(path, D, 4, FOREVER_S)
    former.ask(1)
    os.close(former._fd)  # as if it had died
    former._fd = -1
    prefill = CorePair(path, P, 4, FOREVER_S)
    decode.ask(2)
    assert decode.allowed == 4
    prefill.close()
    decode.close()


def test_the_cores_of_a_node_that_was_killed_are_free_at_once(path: str) -> None:
    decode = CorePair(path, D, 4, FOREVER_S)
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"asked\n"
        decode.ask(3)
        assert decode.allowed == 3
        other.kill()
        other.wait()
        assert decode.allowed == 3, "nobody has looked yet"
        decode.ask(3)
        assert decode.allowed == 4
    decode.close()


@pytest.mark.parametrize("size", [0, 1, 4095, 1 << 20])
def test_another_file_is_left_alone(tmp_path: Path, size: int) -> None:
    path = tmp_path / "cores"
    path.write_bytes(b"x" * size)
    with pytest.raises(ConfigError, match=f"this has {size} bytes$"):
        CorePair(str(path), P, 2)
    assert path.stat().st_size == size


def test_nobody_can_cut_the_memory(path: str) -> None:
    """An access beyond its end would end both nodes."""
    pair = CorePair(path, P, 2)
    with pytest.raises(PermissionError):
        os.truncate(path, 0)
    pair.ask(1)
    pair.close()


def test_memory_that_can_be_cut_is_refused(tmp_path: Path) -> None:
    on_disk = tmp_path / "cores"
    on_disk.write_bytes(bytes(4096))
    unsealed = os.memfd_create("cores", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    for path in (str(on_disk), f"/proc/self/fd/{unsealed}"):
        with pytest.raises(ConfigError, match="4096 bytes and can shrink"):
            CorePair(path, P, 2)
    os.close(unsealed)


def test_a_file_that_cannot_be_opened_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"shared_cores .*: Is a directory"):
        CorePair(str(tmp_path), P, 2)
    with pytest.raises(ConfigError, match=r"shared_cores .*: No such file"):
        CorePair(str(tmp_path / "none" / "cores"), P, 2)


def test_nodes_are_profiled_one_after_the_other(path: str) -> None:
    prefill, decode = CorePair(path, P, 2), CorePair(path, D, 2)

    def stop() -> None:
        raise RequestCancelled("the node was stopped")

    with prefill.turn(stop) as has_turn:
        assert has_turn
        with pytest.raises(RequestCancelled), decode.turn(stop):
            pass
    with decode.turn(stop) as has_turn:
        assert has_turn
    prefill.close()
    decode.close()


def fake_model(device: str = "cpu", share: HostShare = WHOLE_NODE) -> NodeModel:
    return cast("NodeModel", SimpleNamespace(device=torch.device(device), share=share))


def test_a_node_with_cores_of_its_own_joins_no_pair() -> None:
    assert open_pair(NodeConfig(), D, CorePlan(2, (0, 1), (0, 1)), fake_model()) is None


def test_only_cores_of_a_cpu_with_a_thread_each_can_be_shared(path: str) -> None:
    config, two = NodeConfig(shared_cores=path), CorePlan(2, (0, 1), (0, 1))
    with pytest.raises(ConfigError, match="not those of cuda:0: leave it out, or ask for device"):
        open_pair(config, D, two, fake_model("cuda:0"))
    with pytest.raises(ConfigError, match="a node of 2 ranks has its cores to itself"):
        open_pair(config, D, two, fake_model(share=HostShare(Parallelism(2, 1), 0, ())))
    for plan in (CorePlan(1, (0,), (1,)), CorePlan(3, (0, 1), (0, 1))):
        with pytest.raises(ConfigError, match=f"{plan.num_threads} threads on"):
            open_pair(config, D, plan, fake_model())
    pair = open_pair(config, P, two, fake_model())
    assert pair is not None
    assert (pair.num_cores, pair.takes_rest) == (2, True)
    pair.close()


# ---- what a node asks for ------------------------------------------------------------------------

COSTS = StepCosts(knot_tokens=[1, 100], knot_s=[0.010, 0.010])  # on all cores
PROMISED = Targets(tpot_s=0.04)  # so steps of 36 ms are aimed at


class Demanding:
    """A decode node of 8 cores, on which steps take 10 ms on all and 80 ms on one."""

    def __init__(self, num_cores: int = 8) -> None:
        self.clock = ManualClock()
        slowdowns = Slowdowns.proportional(num_cores)
        self.demand = StreamDemand(PerfModel(COSTS), slowdowns, num_cores, self.clock, 0.25)

    def stream(self, due_in_s: float = 1.0, targets: Targets = PROMISED) -> Scheduled:
        """A stream whose next token is due then."""
        gap_s = min(targets.tpot_s, 0.25)
        lifecycle = Lifecycle(received_s=0.0)
        lifecycle.first_token_s = self.clock.now() + due_in_s - gap_s
        request = Request(
            request_id="r",
            prompt_token_ids=[1] * 10,
            sampling=SamplingParams(max_tokens=100),
            lifecycle=lifecycle,
            output_token_ids=[1],
            num_computed_tokens=10,
            targets=targets,
        )
        return Scheduled(request, 1)


def test_streams_get_the_cores_that_their_tpot_needs() -> None:
    bench = Demanding()
    assert bench.demand.cores([bench.stream()]) == 3  # 80 / 3 ms; 40 would be too slow
    assert bench.demand.cores([bench.stream(targets=Targets())]) == 1  # the default: 250 ms
    assert bench.demand.cores([bench.stream(targets=Targets(tpot_s=0.001))]) == 7
    both = [bench.stream(targets=Targets()), bench.stream()]
    assert bench.demand.cores(both) == 3


def test_a_stream_that_is_behind_gets_more() -> None:
    bench = Demanding()
    assert bench.demand.cores([bench.stream(due_in_s=0.021)]) == 4
    assert bench.demand.cores([bench.stream(due_in_s=0.011)]) == 7
    assert bench.demand.cores([bench.stream(due_in_s=-1.0)]) == 7


def test_prompts_alone_need_one_core_and_two_cores_leave_no_choice() -> None:
    bench = Demanding()
    prompt = bench.stream().request
    prompt.output_token_ids.clear()
    prompt.num_computed_tokens = 0
    assert bench.demand.cores([Scheduled(prompt, 10)]) == 1
    two = Demanding(2)
    assert two.demand.cores([two.stream(due_in_s=-1.0)]) == 1


def test_steps_that_take_longer_than_profiled_need_more() -> None:
    bench = Demanding()
    row = bench.stream()
    for _ in range(50):  # as predicted, on two cores: nothing changes
        bench.demand.stepped(shape_of([row]), 0.040, 2.0)
    assert bench.demand.cores([row]) == 3
    for _ in range(50):  # twice as long
        bench.demand.stepped(shape_of([row]), 0.080, 2.0)
    assert bench.demand.cores([row]) == 5
    bench.demand.stepped(shape_of([row]), 99.0, 0.0)  # nothing was computed in it
    assert bench.demand.cores([row]) == 5


# ---- steps ---------------------------------------------------------------------------------------


class Echo:
    """A runner that notes how many cores it had."""

    model_s = 1.5
    launcher = None

    def __init__(self, pair: CorePair) -> None:
        self.pair = pair
        self.allowed: list[int] = []
        self.foreseen: list[Sequence[Scheduled]] = []

    def prepare(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> Callable[[], Sampled]:
        def compute() -> Sampled:
            self.allowed.append(self.pair.allowed)
            return [None] * len(rows)

        return compute

    def foresee(self, rows: Sequence[Scheduled]) -> None:
        self.foreseen.append(rows)


class Fixed:
    """A demand that notes what it is told."""

    def __init__(self) -> None:
        self.shapes: list[StepShape] = []

    def cores(self, rows: Sequence[Scheduled]) -> int:
        return 3

    def stepped(self, shape: StepShape, seconds: float, mean_cores: float) -> None:
        self.shapes.append(shape)


def test_a_step_asks_before_it_begins(path: str) -> None:
    prefill, decode = CorePair(path, P, 4, FOREVER_S), CorePair(path, D, 4, FOREVER_S)
    runner, demand, rows = Echo(decode), Fixed(), [Demanding().stream()]
    steps = SplitSteps(runner, decode, demand)
    prefill.ask(RestDemand().cores(rows))
    compute = steps.prepare(rows)
    assert prefill.allowed == 1
    assert compute() == [None]
    assert (runner.allowed, demand.shapes) == ([3], [shape_of(rows)])
    steps.foresee(rows)
    assert (runner.foreseen, steps.model_s) == ([rows], 1.5)
    prefill.close()
    decode.close()
