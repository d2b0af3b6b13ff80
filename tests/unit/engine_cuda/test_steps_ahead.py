"""Steps that take their tokens from the step before on the device, where nobody has read them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from tests.matrix import matrix

pytest.importorskip("triton")

from pdserve.engine.engine import Engine
from pdserve.engine.foresight import foreseen
from pdserve.engine.interface import Runner, StepReport
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.model_runner import ModelRunner, ModelStep
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.engine.scheduler import Queues, StepRuns
from pdserve.measured.perf_model import StepRow
from pdserve.node.profiling.timer import StepTimer
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import UnusableLogits
from tests.checkpoints import make_checkpoint
from tests.fakes.graphs import Recorded
from tests.fakes.late_copies import PromptCopies
from tests.fakes.runner import Observer, PlainRunner, decode_policy
from tests.requests import make_request
from tests.unit.engine_cuda.test_launch_counts import Launches, cuda_node
from tests.unit.engine_cuda.test_ranks import cuda_decoders
from tests.unit.engine_model.harness import DecoderKind, Node, make_prompt
from tests.unit.engine_model.threaded_ranks import threaded_node

pytestmark = pytest.mark.usefixtures("interpreted")
BLOCK = 8
EOS = frozenset(range(0, 256, 7))


class Whole(PlainRunner):
    """The same steps, one after the other."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def prepare(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> Callable[[], list[SampledToken | None]]:
        return self._runner.prepare(rows, progress)

    def foresee(self, rows: Sequence[Scheduled]) -> None:
        self._runner.foresee(rows)


def several() -> list[Request]:
    """One of them ends by itself."""
    return [
        make_request(make_prompt(3, seed=1), max_tokens=9, temperature=1.0, seed=5),
        make_request(
            make_prompt(5),
            temperature=1.0,
            max_tokens=5,
            ignore_eos=True,
            seed=6,
            logprobs=3,
            top_k=40,
        ),
        make_request(make_prompt(4), max_tokens=4, logit_bias={3: 2.0}, min_tokens=9, logprobs=0),
    ]


@dataclass
class Outputs(Observer):
    """Of all these requests: their tokens, and the log-probabilities of those."""

    token_ids: list[list[int]] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def step_done(self, report: StepReport) -> None:
        for token in report.sampled:
            if token is not None and token.logprobs is not None:
                self.top_ids.append(token.logprobs.top_ids)
                self.logprobs += [token.logprobs.chosen, *token.logprobs.top_logprobs]
        super().step_done(report)


def outputs_of(node: Node, runner: Runner, requests: list[Request]) -> Outputs:
    async def scenario() -> Outputs:
        queues = Queues(BlockPool(node.kv_cache.num_blocks, BLOCK), ManualClock())
        engine, outputs = Engine(queues, decode_policy(64, 4), EOS), Outputs()
        task = asyncio.create_task(engine.run(runner, outputs))
        for request in requests:
            engine.submit(request)
        async with asyncio.timeout(100):
            while len(outputs.done) < len(requests):
                outputs.changed.clear()
                await outputs.changed.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        outputs.token_ids = [request.output_token_ids for request in requests]
        return outputs

    return asyncio.run(scenario())


@pytest.mark.parametrize("limits", matrix([{"most_draws": 2}, {}, {"buckets": (1, 2)}], 1), ids=str)
def test_tokens_are_those_of_one_step_after_the_other(
    tmp_path: Path, limits: dict[str, Any]
) -> None:
    """Also where steps of three rows have no graph, or are sampled in rounds."""
    node = cuda_node(tmp_path, 1, PromptCopies(), has_graphs=True, **limits)
    node.runner = ModelRunner(node.model, node.kv_cache, eos_token_ids=EOS)
    expected = outputs_of(node, Whole(node.runner), several())
    node.kv_cache.pool.fill_(float("nan"))
    found = outputs_of(node, node.runner, several())
    assert (found.token_ids, found.top_ids) == (expected.token_ids, expected.top_ids)
    # Rows that are computed in vain change the last bits of the others.
    assert found.logprobs == pytest.approx(expected.logprobs, rel=1e-5)
    assert [len(tokens) for tokens in found.token_ids] == [2, 5, 4]


@pytest.mark.long  # one rank does by default
def test_all_ranks_run_ahead(tmp_path: Path) -> None:
    """The host has no tokens for any of them: only rank 0's device has, and both stages wait."""
    path = make_checkpoint(tmp_path, "llama", num_hidden_layers=2, max_position_embeddings=64)
    expected, found = (
        [make_request(make_prompt(n), max_tokens=4, ignore_eos=True) for n in (1, 3)]
        for _ in range(2)
    )
    Node.load(path, DecoderKind.TORCH, block_size=BLOCK).generate(expected, 4)
    make = cuda_decoders([], (2,))
    with threaded_node(path, 2, make, num_stages=2, num_blocks=40, block_size=BLOCK) as (node, _):
        outputs_of(node, node.runner, found)
        assert node.model.num_ahead == 2, "behind the prompts come one step and two ahead"
    assert [r.output_token_ids for r in found] == [r.output_token_ids for r in expected]


class TwoSteps:
    """Two streams, a step that is launched, and the one behind it."""

    def __init__(self, path: Path, **limits: Any) -> None:
        self.copies = PromptCopies()
        self.node = cuda_node(path, 1, self.copies, has_graphs=True, **limits)
        self.requests = [make_request(make_prompt(n), max_tokens=20) for n in (3, 5)]
        for request in self.requests:
            request.block_table = [self.node.free.pop() for _ in range(3)]
            self.node.step([Scheduled(request, request.num_tokens)])
        self.node.step(self.rows)  # pinned memory grows
        self.queues = Queues(BlockPool(1, BLOCK), ManualClock())
        self.queues.running = list(self.requests)
        self.copies.forget()
        self.num_pinned = self.copies.num_pinned
        self.step = self.node.runner.prepare(self.rows)
        self.step.launch()

    @property
    def rows(self) -> list[Scheduled]:
        return [Scheduled(request, 1) for request in self.requests]

    def prepared(self) -> ModelStep:
        rows = self.rows
        with foreseen(self.queues, rows):
            return self.step.prepare_next(rows)

    def end(self, step: ModelStep) -> list[SampledToken]:
        sampled = [token for token in step.result() if token is not None]
        for request, token in zip(self.requests, sampled, strict=True):
            request.num_computed_tokens += 1
            request.output_token_ids.append(token.token_id)
        return sampled


@pytest.mark.long
def test_what_a_step_ahead_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch more than any other; and its launch waits for nothing, not even the last step."""
    two = TwoSteps(tmp_path)
    copies = two.copies
    assert [len(copies.started), len(copies.fetched), copies.num_waits] == [1, 1, 0]
    assert two.step.can_be_followed
    ahead = two.prepared()
    with monkeypatch.context() as patch, Launches(patch, copies, sees_nodes=False) as launches:
        ahead.launch()
    once = ("aten.copy_.default", "take_sampled_tokens", "replay", "choose_tokens")
    assert launches.counts == dict.fromkeys(once, 1)
    assert [len(copies.started), len(copies.fetched), copies.num_waits] == [2, 2, 0]
    assert not any(copy.is_done for copy in copies.fetched)
    for _ in range(2):
        two.end(two.step)
        assert [copy.num_waits for copy in copies.fetched[-2:]] == [1, 0]
        two.step = ahead
        ahead = two.prepared()
        ahead.launch()
    two.end(two.step)
    two.end(ahead)
    assert [copy.num_waits for copy in copies.fetched] == [1] * 4
    assert [copy.num_waits for copy in copies.started] == [0] * 4
    assert copies.num_pinned == two.num_pinned


@pytest.mark.parametrize("limits", matrix([{"most_draws": 1}, {"buckets": (1,)}], 1), ids=str)
def test_what_cannot_run_ahead_is_planned_again(tmp_path: Path, limits: dict[str, Any]) -> None:
    two = TwoSteps(tmp_path, **limits)
    assert not two.step.can_be_followed
    with pytest.raises(StepRuns):
        two.prepared()
    two.end(two.step)
    assert len(two.node.runner.execute(two.rows)) == 2


def test_without_graphs_nothing_runs_ahead(tmp_path: Path) -> None:
    """Also where they cannot be captured, which the first step finds out."""
    assert cuda_node(tmp_path / "none", 1, PromptCopies(), has_graphs=False).runner.launcher is None
    node = cuda_node(tmp_path / "failing", 1, PromptCopies(), has_graphs=True)
    assert node.runner.launcher is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorded, "record", _forbidden)
        node.step([Scheduled(make_request(make_prompt(3)), 3)])
    assert node.runner.launcher is None


def _forbidden(*_: object) -> NoReturn:
    raise RuntimeError("operation not permitted when stream is capturing")


def test_a_row_without_a_token_harms_only_its_own_request(tmp_path: Path) -> None:
    """The step ahead is launched by then: its row computes something, and is dropped."""
    two = TwoSteps(tmp_path)
    bad, good = two.requests
    two.node.kv_cache.pool[bad.block_table[0]] = float("nan")
    two.step.result()
    two.step = two.node.runner.prepare(two.rows)
    two.step.launch()
    ahead = two.prepared()
    ahead.launch()
    with pytest.raises(UnusableLogits) as failure:
        two.step.result()
    assert failure.value.request_ids == [bad.request_id]
    with pytest.raises(UnusableLogits):
        ahead.result()
    assert two.node.kv_cache.pool[good.block_table[0], :, :, :, :1].isfinite().all()


@pytest.mark.long
def test_a_profile_has_steps_as_they_are_served(tmp_path: Path) -> None:
    """Each behind another one, of whose tokens the host knows nothing."""
    copies = PromptCopies()
    node = cuda_node(tmp_path, 1, copies, has_graphs=True)
    node.kv_cache.pool.zero_()
    timer = StepTimer(node.runner, BLOCK, 256)
    decodes = tuple(StepRow(1, context, is_decoding=True) for context in (1, 8, 20))
    timer.seconds(decodes)
    copies.forget()
    timed = timer.timed(decodes)
    assert 0 < timed.model_s <= timed.seconds
    assert [copy.num_waits for copy in copies.fetched] == [1, 1]
    copies.forget()
    timer.seconds((StepRow(5, 0), *decodes))
    assert [copy.num_waits for copy in copies.fetched] == [1]


@pytest.mark.parametrize("num_tokens", [1, 7, 300])
def test_tokens_are_taken_by_the_rows_that_sampled_them(num_tokens: int) -> None:
    from pdserve.engine.cuda.layers.rows import take_sampled

    generator = torch.Generator().manual_seed(num_tokens)
    sampled = torch.randint(-2, 1000, (50,), generator=generator, dtype=torch.int32)
    token_ids = torch.randint(-50, 1000, (num_tokens,), generator=generator)
    expected = [t if t >= 0 else max(0, int(sampled[-1 - t])) for t in token_ids.tolist()]
    take_sampled(token_ids, sampled)
    assert token_ids.tolist() == expected
