"""Masks beside the steps: whose answers sit a step out, and that this changes no token."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
from collections.abc import Callable

import numpy as np
import pytest

from pdserve.engine.grammar import GrammarProgress
from pdserve.engine.grammar.ahead import MaskAhead, MaskQueue
from pdserve.engine.grammar.mask_jobs import MaskLimits
from pdserve.engine.request import Request, Scheduled
from pdserve.grammar.budget import STEP_CPU_S
from pdserve.lifecycle import Targets
from pdserve.shared.errors import GrammarFailed
from tests.unit.engine_grammar.answers import DemoModel

AMBIGUOUS = 'start: e\ne: e e | "a" | "b" | "ab" | "ba" | /[a-z ]/'


def decoding(demo: DemoModel, name: str, payer: str, grammar: str = AMBIGUOUS) -> Request:
    """One that has token 1."""
    request = demo.request(grammar, 0, name)
    request.targets = Targets(payer=payer)
    request.output_token_ids += demo.ids("a")
    request.num_computed_tokens = request.num_prompt_tokens
    return request


def rows(*requests: Request) -> list[Scheduled]:
    return [Scheduled(request, 1) for request in requests]


def goes_on(demo: DemoModel, *requests: Request) -> None:
    for request in requests:
        request.output_token_ids += demo.ids("b")
        request.num_computed_tokens += 1


async def ready(progress: GrammarProgress, *requests: Request) -> None:
    """Until none of these is held."""
    woken = asyncio.Event()
    async with asyncio.timeout(30):
        while progress.hold(rows(*requests), woken.set):
            await woken.wait()
            woken.clear()


async def test_the_first_mask_is_awaited_outside_of_steps_and_is_the_same(demo: DemoModel) -> None:
    progress, request = GrammarProgress(), decoding(demo, "r", "eve")
    assert progress.hold(rows(request), lambda: None) == {request}
    await ready(progress, request)
    masks = progress.masks([request])
    alone = GrammarProgress().masks([dataclasses.replace(request)])
    assert masks is not None
    assert alone is not None
    assert np.array_equal(masks.bits, alone.bits)


async def test_a_payer_has_a_share_of_a_step_that_others_are_in(demo: DemoModel) -> None:
    """Each mask takes half of the share, as the clock says."""
    ticks = itertools.count()
    progress = GrammarProgress(cpu_clock=lambda: next(ticks) * STEP_CPU_S / 2)
    eves = [decoding(demo, f"eve {i}", "eve") for i in range(6)]
    other = decoding(demo, "ann", "ann", grammar="")
    progress.masks(eves)
    goes_on(demo, *eves)
    held = progress.hold(rows(*eves, other), lambda: None)
    assert held == set(eves[2:])
    await ready(progress, *eves, other)
    assert progress.masks(eves) is not None


async def test_a_mask_that_fails_fails_its_own(demo: DemoModel) -> None:
    progress = GrammarProgress()
    good, bad = decoding(demo, "good", "ann"), decoding(demo, "bad", "eve", 'start: "x"')
    await ready(progress, good, bad)
    with pytest.raises(GrammarFailed) as failed:
        progress.masks([good, bad])
    assert failed.value.request_ids == ["bad"]
    await ready(progress, good)
    assert progress.masks([good]) is not None


def a_mask(payer: str, write: Callable[[], None], spent_s: float = 0.0) -> MaskAhead:
    return MaskAhead(payer, 1, np.zeros(1, np.int32), write, lambda: payer != "gone", spent_s)


async def test_payers_take_turns() -> None:
    queue, gate, done = MaskQueue(1, MaskLimits()), threading.Event(), asyncio.Event()
    order: list[str] = []
    names = ["eve"] * 5 + ["ann"] * 2
    queue.wake = done.set
    queue.begin(a_mask("", lambda: gate.wait() and None))
    queue.begin(a_mask("gone", lambda: order.append("gone")))
    masks = [a_mask(name, lambda name=name: order.append(name)) for name in names]
    for mask in masks:
        queue.begin(mask)
    gate.set()
    async with asyncio.timeout(30):
        while not all(mask.is_done for mask in masks):
            await done.wait()
            done.clear()
    assert order == ["eve", "ann", "eve", "ann", "eve", "eve", "eve"]


async def test_what_takes_too_long_is_given_up_and_an_answer_has_a_budget() -> None:
    stuck, woken = threading.Event(), asyncio.Event()
    queue = MaskQueue(1, MaskLimits(cpu_s=0.02, wall_s=0.02), answer_cpu_s=1.0)

    def wake() -> None:
        queue._limits = MaskLimits(cpu_s=60.0, wall_s=60.0)  # of the one behind
        woken.set()

    queue.wake = wake
    slow, behind = a_mask("eve", lambda: stuck.wait() and None), a_mask("ann", lambda: None)
    try:
        for mask in (slow, behind):
            queue.begin(mask)
        async with asyncio.timeout(30):
            while not (slow.is_done and behind.is_done):
                await woken.wait()
                woken.clear()
    finally:
        stuck.set()
    assert "no mask within" in slow.failure
    assert not behind.failure
    spent = a_mask("eve", lambda: None, spent_s=1.0)
    queue.begin(spent)
    assert spent.failure == "its masks took 1 s of CPU time"
