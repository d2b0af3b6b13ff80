"""What weights by role cost: held-out answers of the demo model, by what computes which part."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch

from pdserve.commands.simulation.plan.devices.rounding import OF_KV, OF_WEIGHTS
from pdserve.demo_model import CHECKPOINT_PATH
from pdserve.engine.request import Request, Scheduled
from pdserve.kv import KvDtype
from pdserve.model_files.tokenizer import read_tokenizer
from tests.plain_batch import build_batch
from tests.requests import make_request
from tests.unit.engine_model.harness import CPU, Node
from tools.demo_model.exchange import draw
from tools.demo_model.skills import arithmetic, stories

BLOCK, NUM_BLOCKS = 16, 12
FORMS = ("none", "int8", "fp8", "int4")
SKILLS = (arithmetic.addition, arithmetic.comparison, stories.story)


def exchanges() -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) as token ids: questions that no training run has seen."""
    (tokenizer, _), rng = read_tokenizer(CHECKPOINT_PATH), random.Random(0)
    drawn = [draw(skill, rng, held_out=True) for skill in SKILLS for _ in range(10)]
    texts = [(f"<|user|>{e.question}<|end|><|assistant|>", f"{e.answer}<|end|>") for e in drawn]
    return [(tokenizer.encode(q).ids, tokenizer.encode(a).ids) for q, a in texts]


def log_probs(node: Node, request: Request, answer: Sequence[int]) -> torch.Tensor:
    """Log-probabilities of the answer's tokens, whose prompt but for its last token has KV."""
    batch = build_batch([Scheduled(request, len(answer))], BLOCK, CPU)
    every_row = replace(batch, sampled_rows=torch.arange(len(answer)))
    with torch.inference_mode():
        logits = node.model.logits(every_row, node.kv_cache.pool)
    assert logits is not None
    return logits.float().log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


def of_pairs(
    prompt: Sequence[int], answer: Sequence[int], nodes: Mapping[str, Node]
) -> dict[tuple[str, str], torch.Tensor]:
    """(prefill, decode) |-> log-probabilities of the answer."""
    found = {}
    for prefill, decode in product(nodes, nodes):
        request = make_request([*prompt, *answer])
        request.block_table = list(range(NUM_BLOCKS))
        first, second = nodes[prefill], nodes[decode]
        begun = build_batch([Scheduled(request, len(prompt) - 1)], BLOCK, CPU)
        with torch.inference_mode():
            first.model.logits(begun, first.kv_cache.pool)
        second.kv_cache.pool[:NUM_BLOCKS] = first.kv_cache.pool[:NUM_BLOCKS]
        request.num_computed_tokens = len(prompt) - 1
        found[prefill, decode] = log_probs(second, request, answer)
    return found


@pytest.mark.long
def test_the_table_says_how_far_off_each_pair_is() -> None:
    """In thousandths of a nat, on average over tokens, beside bfloat16 for both."""
    nodes = {
        form: Node.load(CHECKPOINT_PATH, dtype=KvDtype.BFLOAT16, quantization=form, num_tokens=128)
        for form in FORMS
    }
    found = [of_pairs(prompt, answer, nodes) for prompt, answer in exchanges()]
    for prefill in FORMS:
        off = [
            torch.cat([(one[prefill, decode] - one["none", "none"]).abs() for one in found])
            for decode in FORMS
        ]
        means = [1000 * float(each.mean()) for each in off]
        said = OF_WEIGHTS["bfloat16" if prefill == "none" else prefill]
        assert list(said.values()) == pytest.approx(means, rel=0.25, abs=1.0)


@pytest.mark.long
@pytest.mark.parametrize("kv", [KvDtype.INT8, KvDtype.FP8])
def test_kv_in_codes_is_as_far_off_as_is_said(kv: KvDtype) -> None:
    stored, coded = (
        Node.load(CHECKPOINT_PATH, dtype=KvDtype.BFLOAT16, kv_dtype=each, num_tokens=128)
        for each in (KvDtype.BFLOAT16, kv)
    )
    off = []
    for prompt, answer in exchanges():
        one, other = (of_pairs(prompt, answer, {"": node})["", ""] for node in (stored, coded))
        off.append((one - other).abs())
    assert 1000 * float(torch.cat(off).mean()) == pytest.approx(OF_KV[kv], rel=0.25, abs=1.0)
