"""EAGLE-3 heads on the CUDA path: the rows that they go on from, and what they draft of these."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from pdserve.engine.attention.reference import ReferenceAttention
from pdserve.engine.drafts.heads.eagle3 import (
    Eagle3Head,
    HeadPlan,
    parse_eagle3,
    read_weights,
)
from pdserve.engine.drafts.heads.head import HeadRows
from pdserve.engine.drafts.heads.source import HeadSource
from pdserve.engine.drafts.speculation import Speculation
from pdserve.engine.engine import Engine
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.models.torch_decoder import TorchDecoder
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.engine.steps.tapped import Tapped
from pdserve.engine.steps.taps import TapPlan
from pdserve.shared.clock import ManualClock
from tests.checkpoints import make_checkpoint
from tests.fakes.late_copies import PromptCopies
from tests.fakes.runner import Observer, decode_policy
from tests.heads import make_eagle3
from tests.requests import make_request
from tests.unit.engine_cuda.decoders import make_node, random_weights
from tests.unit.engine_cuda.test_launch_counts import cuda_node
from tests.unit.engine_cuda.test_ranks import cuda_decoders
from tests.unit.engine_model.drafted import answers, tokens_of
from tests.unit.engine_model.harness import DecoderKind, Node, make_prompt
from tests.unit.engine_model.test_eagle3 import know
from tests.unit.engine_model.threaded_ranks import threaded_node

pytestmark = pytest.mark.usefixtures("interpreted")

TAPS = (0, 1, 1)
BLOCK = 8
CPU = torch.device("cpu")


def device_head(path: Path) -> Eagle3Head:
    """With the kernels and copies of a GPU."""
    from pdserve.engine.cuda.attention.triton_attention import TritonAttention
    from pdserve.engine.cuda.copies.staging import Staging

    plan = head_plan(path)
    upload = Staging(PromptCopies()).upload
    return Eagle3Head(plan, read_weights(plan.folder), TritonAttention(), upload)


def head_plan(path: Path) -> HeadPlan:
    values = json.loads((path / "config.json").read_text())
    return HeadPlan(path, parse_eagle3(values, "made"), 20, "made")


def requests() -> list[Request]:
    seeded: dict[str, Any] = {"temperature": 0.8, "seed": 5}
    common: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}
    return [
        make_request(make_prompt(5, 5), request_id="greedy", **common),
        make_request(make_prompt(3, 3), request_id="seeded", **common, **seeded),
    ]


@pytest.mark.long  # a head drafts from them by default
def test_rows_are_those_before_the_layers(tmp_path: Path) -> None:
    """Of a step that is launched, of one in pieces, and of two graphs."""
    limits: dict[str, Any] = {"pieces": (4,), "buckets": (1, 2), "has_graphs": True}
    cuda = cuda_node(tmp_path, 2, PromptCopies(), tap_layers=TAPS, **limits)
    weights = random_weights(cuda.model.config, torch.float32, CPU)
    plain = make_node(TorchDecoder(cuda.model.config, weights, ReferenceAttention()))
    expect_same_rows(cuda, plain)


def expect_same_rows(node: Node, expected: Node) -> None:
    found: list[list[Tapped]] = []
    for each in (node, expected):
        each.runner.taps = TapPlan("a head", TAPS)
        one, other = requests()
        found.append([])
        for rows in ([(one, 5)], [(one, 1)], [(one, 1), (other, 2)], [(one, 1), (other, 1)]):
            each.step([Scheduled(*row) for row in rows])
            found[-1] += [request.tapped for request, _ in rows if request.tapped is not None]
        each.runner.taps = None
    assert [tapped.first for tapped in found[0]] == [tapped.first for tapped in found[1]]
    assert [tapped.first for tapped in found[0]] == [4, 5, 6, 7, 2]
    for here, there in zip(*found, strict=True):
        np.testing.assert_allclose(here.rows, there.rows, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_it_drafts_what_it_drafts_on_cpus(tmp_path: Path) -> None:
    """Of streams together, of a row or of several, and behind what was drafted before."""
    path = make_eagle3(tmp_path / "head")
    rows = torch.randn(9, 3 * 64)
    found = []
    for head in (device_head(path), Eagle3Head.load(head_plan(path))):
        states, tables = head.entered(rows), [[3, 1], [2, 5]]
        first = [
            HeadRows([7, 8, 9, 10], states[:4], 60, 62, tables[0]),
            HeadRows([11], states[4:5], 30, 0, tables[1]),
        ]
        said = head.step(first)
        drafted = [
            HeadRows([said[0][0]], said[0][1][-1:], 64, 66, tables[0]),
            HeadRows([said[1][0]], said[1][1], 31, 1, tables[1]),
        ]
        found.append([*said, *head.step(drafted)])
    for (token, states), (expected, of_cpu) in zip(*found, strict=True):
        assert token == expected
        torch.testing.assert_close(states, of_cpu, atol=1e-4, rtol=1e-4)


@pytest.mark.long
def test_a_device_waits_for_its_drafts_and_says_the_same(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"has_graphs": True, "buckets": (1, 4), "tap_layers": TAPS}
    node = cuda_node(tmp_path / "model", 2, PromptCopies(), **limits)
    head = device_head(make_eagle3(tmp_path / "head"))
    expected = tokens_of(answers(node, requests()))
    know(head, expected)
    asked = requests()

    async def scenario() -> Speculation:
        pool = BlockPool(node.kv_cache.num_blocks, BLOCK)
        engine = Engine(Queues(pool, ManualClock()), decode_policy(64, 4), frozenset())
        speculation = Speculation(pool, lambda _: 1.0, 16)
        source = HeadSource(head, node.runner, engine.queues, lambda _: 1.0, lambda: 0.0)
        speculation.add(source)
        engine.speculate, engine.awaits, engine.draft = speculation, source.awaits, source.plan
        observer = Observer()
        task = asyncio.create_task(engine.run(node.runner, observer))
        for request in asked:
            engine.submit(request)
        async with asyncio.timeout(100):
            while len(observer.done) < len(asked):
                observer.changed.clear()
                await observer.changed.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return speculation

    counts = asyncio.run(scenario()).counts["model"]
    assert {request.request_id: request.output_token_ids for request in asked} == expected
    assert counts.accepted > 0.3 * counts.drafted > 0


@pytest.mark.long
@pytest.mark.parametrize(("num_ranks", "num_stages"), [(2, 1), (1, 2)])
def test_rank_0_has_the_rows_of_all(tmp_path: Path, num_ranks: int, num_stages: int) -> None:
    """Ranks of one stage replay the same graphs without copying any; stages hand theirs on."""
    path = make_checkpoint(tmp_path / "model", "llama", max_position_embeddings=64)
    make = cuda_decoders([], (1, 2), pieces=(4,), least_part=1, tap_layers=TAPS)
    sizes = {"num_stages": num_stages, "num_blocks": 40, "block_size": BLOCK}
    with threaded_node(path, num_ranks, make, **sizes) as (node, _):
        expect_same_rows(node, Node.load(path, DecoderKind.TORCH, block_size=BLOCK))
