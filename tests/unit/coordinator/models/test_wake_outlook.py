"""What a request for a model without nodes waits for."""

from __future__ import annotations

import pytest

from coordinator.admission import WaitingLine
from coordinator.generation import GenerationRequest
from coordinator.models.wake_outlook import WakeOutlook
from coordinator.nodes.registry import Registry
from coordinator.pools.wakes import Coming
from coordinator.prefixes.index import PromptHashes
from coordinator.requests.running import RunningRequest
from pdserve.protocol import NodeRole, PerfReport, Prompt, SamplingParams, Slo, StepCosts
from tests.fakes.members import join, report

STANDARD = Slo(name="standard", priority=1, ttft_s=10.0)
BATCH = Slo(name="batch")
PERF = PerfReport(
    step=StepCosts(knot_tokens=[1, 1000], knot_s=[0.001, 1.0]), token_budget=1000, max_batch_size=64
)


async def test_prompts_take_what_the_last_nodes_took_and_those_of_lower_classes_go_later() -> None:
    registry, line = Registry(), WaitingLine[RunningRequest](8)
    outlook = WakeOutlook(registry, lambda: False, line, lambda: Coming(0.25, is_ordered=True))
    waiting = []
    for number, slo in enumerate((BATCH, STANDARD, STANDARD)):
        prompt = Prompt([7] * 500)
        request = GenerationRequest(
            request_id=str(number), prompt=prompt, sampling=SamplingParams(), slo=slo
        )
        hashes = PromptHashes(prompt, is_reusable=True)
        running = RunningRequest(request, hashes, 0.0, 60.0, lambda running, by_itself: None)
        waiting.append(running)
        line.join(str(number), running, slo, 0.0)
    first = outlook.of(STANDARD, Prompt([7] * 100))
    assert first is not None
    assert (first.wake_s, first.queue_s, first.prompt_s) == (0.25, 0.0, 0.0)  # no node so far
    node = join(registry, "p", NodeRole.PREFILL)
    registry.profiled(node, PERF)
    report(registry, node, NodeRole.PREFILL)
    registry.remove(node)
    told = outlook.of(STANDARD, Prompt([7] * 100))
    assert told is not None
    assert told.queue_s == pytest.approx(1.0)  # of two
    assert told.prompt_s == pytest.approx(0.1)
    assert told.ttft_s == pytest.approx(1.35)
    for running in waiting:
        running.cancel("done")


def test_nothing_is_awaited_of_a_model_that_is_awake() -> None:
    line = WaitingLine[RunningRequest](8)
    outlook = WakeOutlook(Registry(), lambda: True, line, lambda: Coming(1.0, is_ordered=True))
    assert outlook.of(STANDARD, Prompt([1])) is None
    assert outlook.wake_s() == 0.0
