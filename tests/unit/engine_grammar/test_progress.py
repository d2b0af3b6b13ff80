"""Positions in grammars: kept from step to step, made anew from tokens, given up in time."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pdserve.demo_model import CHECKPOINT_PATH
from pdserve.engine.grammar import GrammarProgress, TokenMasks
from pdserve.engine.grammar.masks import mask_logits
from pdserve.engine.request import Ahead, Request, Scheduled
from pdserve.grammar import compile_grammar, is_light, load_vocabulary
from pdserve.grammar.budget import STEP_CPU_S
from pdserve.lifecycle import Targets
from pdserve.protocol import FinishReason
from pdserve.shared.errors import GrammarFailed
from tests.unit.engine_grammar.answers import DemoModel

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "sizes": {"type": "array"}},
    "required": ["name"],
    "additionalProperties": False,
}
ANY_OBJECT = '{"grammars": [{"json_schema": {"type": "object"}}]}'
OBJECT = json.dumps({"grammars": [{"json_schema": SCHEMA}]})
AB = "start: /ab?/"
END = frozenset({5, 0})


def allowed(masks: TokenMasks | None, row: int = 0) -> set[int]:
    assert masks is not None
    tokens = masks.allowed(2048, torch.device("cpu"))[row]
    return set(tokens.nonzero()[:, 0].tolist())


def again(request: Request, num_tokens: int) -> Request:
    """The same request in another engine, after so many tokens."""
    output = request.output_token_ids[:num_tokens]
    return dataclasses.replace(request, output_token_ids=output, finish_reason=None)


def test_what_may_come_is_what_the_grammar_says(demo: DemoModel) -> None:
    progress = GrammarProgress()
    request = demo.request(AB, 0, "ab")
    texts = {demo.tokenizer.decode([i]) for i in allowed(progress.masks([request]))}
    assert texts == {"a", "ab"}
    request.output_token_ids += demo.ids("a")
    tokens = allowed(progress.masks([request]))
    assert tokens == {*demo.ids("b"), *END}
    request.output_token_ids += demo.ids("b")
    assert allowed(progress.masks([request])) == END, "nothing but an end can follow"


def test_stop_tokens_may_end_what_is_complete(demo: DemoModel) -> None:
    progress = GrammarProgress()
    request = demo.request(AB, 0, "ab", stop_token_ids=[77, 10**6])
    assert 77 not in allowed(progress.masks([request]))
    request.output_token_ids += demo.ids("ab")
    assert allowed(progress.masks([request])) == {77, *END}


def test_masks_are_for_the_rows_that_want_them(demo: DemoModel) -> None:
    progress = GrammarProgress(num_threads=2)
    plain = demo.request("", 0, "plain")
    assert progress.masks([plain]) is None
    assert progress.num_answers == 0
    rows = [plain, demo.request(AB, 0, "ab"), plain, demo.request(OBJECT, 0, "object")]
    masks = progress.masks(rows)
    assert masks is not None
    assert masks.rows == [1, 3]
    assert {demo.tokenizer.decode([i])[0] for i in allowed(masks, 1)} == {"{"}
    logits = torch.zeros(4, 2048)
    kept = mask_logits(logits, masks).isfinite().sum(dim=1).tolist()
    assert kept == [2048, 2, 2048, len(allowed(masks, 1))]
    assert not logits.any(), "logits stay as they are"


def test_an_answer_goes_on_from_its_tokens_wherever_it_is(demo: DemoModel) -> None:
    """Handed off, preempted, resumed: the masks are those of the node that saw every token."""
    request = demo.request(OBJECT, 3, "whole")
    kept = GrammarProgress()
    wanted = []
    while request.finish_reason is None:
        wanted.append(allowed(kept.masks([request])))
        demo.step([request])
    assert len(wanted) > 10
    for num_tokens, tokens in enumerate(wanted):
        elsewhere = GrammarProgress()
        assert allowed(elsewhere.masks([again(request, num_tokens)])) == tokens
        if num_tokens % 5 == 0:  # and on from there, from step to step
            resumed = again(request, num_tokens)
            for rest in range(num_tokens, len(wanted)):
                assert allowed(elsewhere.masks([resumed])) == wanted[rest]
                resumed.output_token_ids.append(request.output_token_ids[rest])


@pytest.mark.parametrize("grammar", [OBJECT, AB, 'start: /[a-z ]{1,9}/ " "? /[0-9]+/'])
def test_an_answer_returns_from_its_drafts(demo: DemoModel, grammar: str) -> None:
    """Right ones and wrong ones, and such as end it: each row has the mask of its own place."""
    whole = demo.request(grammar, 3, "whole")
    demo.run([whole])
    request, progress, chosen = again(whole, 1), GrammarProgress(), random.Random(5)
    for place in range(1, len(whole.output_token_ids)):
        rest = whole.output_token_ids[place : place + 4]
        assert list(progress.allowed(request, rest)) == rest, "it is where it was"
        wild = [*rest[: chosen.randrange(3)], chosen.choice(sorted(END)), 300]
        request.draft = chosen.choice([rest, rest[:-1], progress.allowed(request, wild)])
        ahead = [Ahead.of(request, number) for number in range(1, 1 + len(request.draft))]
        masks = progress.masks([request, *ahead])
        for row, known in enumerate([request, *ahead]):
            if END & set(known.output_token_ids):
                assert not allowed(masks, row)
                continue
            alone = dataclasses.replace(whole, output_token_ids=known.output_token_ids)
            alone.finish_reason = None
            assert allowed(masks, row) == allowed(GrammarProgress().masks([alone]))
        request.draft = ()
        request.output_token_ids.append(whole.output_token_ids[place])


def test_a_name_that_was_guessed_is_no_value(demo: DemoModel) -> None:
    """A matcher that was rolled back from the name took the value's end for one of a name."""
    named = {demo.tokenizer.decode([token]): token for token in range(2048)}
    name, end, begin, of_value = named["output"], named['":'], named['{"'], named[' "']
    request, progress = demo.request(ANY_OBJECT, 3, "guessed"), GrammarProgress()
    request.output_token_ids += [begin, name, end]
    request.draft = [begin, name]
    progress.masks([request, *(Ahead.of(request, number) for number in (1, 2))])
    request.draft = ()
    request.output_token_ids += [of_value, named["4"]]
    found = allowed(progress.masks([request]))
    assert named['"}'] in found
    assert end not in found


def test_a_draft_that_breaks_the_matcher_fails_nobody(demo: DemoModel) -> None:
    request, progress = demo.request(OBJECT, 3, "broken"), GrammarProgress()
    request.output_token_ids += demo.ids("{")
    before = allowed(progress.masks([request]))
    request.draft = demo.ids("xx")
    ahead = [Ahead.of(request, number) for number in range(1, 1 + len(request.draft))]
    masks = progress.masks([request, *ahead])
    assert allowed(masks) == before
    assert not allowed(masks, 1)
    request.draft = ()
    assert allowed(progress.masks([request])) == before
    assert progress.allowed(request, demo.ids('"')), "a copy was broken, and no other"


def test_masks_of_drafts_are_of_their_payers_share(demo: DemoModel) -> None:
    """Each mask takes a quarter of the share, as the clock says: one is needed, three are left."""
    ticks = itertools.count()
    progress = GrammarProgress(cpu_clock=lambda: next(ticks) * STEP_CPU_S / 4)
    request, other = demo.request(OBJECT, 3, "eve"), demo.request("", 0, "ann")
    request.targets = Targets(payer="eve")
    for one in (request, other):
        one.output_token_ids += demo.ids("{")
        one.num_computed_tokens = one.num_prompt_tokens
    progress.masks([request])
    assert not progress.hold([Scheduled(request, 1), Scheduled(other, 1)], lambda: None)
    assert progress.afford(request, 2) == 2
    assert progress.afford(request, 2) == 1
    assert progress.afford(request, 2) == 0


def test_tokens_of_a_resumed_answer_are_those_of_one_that_ran_on(demo: DemoModel) -> None:
    whole = demo.request(OBJECT, 11, "ran-on", logprobs=3)
    demo.run([whole])
    resumed = again(whole, len(whole.output_token_ids) // 2)
    resumed.request_id = "resumed"
    resumed.num_computed_tokens, resumed.block_table = 0, []
    demo.run([resumed])
    assert resumed.output_token_ids == whole.output_token_ids


def test_answers_to_one_prompt_follow_their_grammars_from_token_one_on(demo: DemoModel) -> None:
    alone = [demo.request(OBJECT, seed, f"alone-{seed}") for seed in range(3)]
    demo.step(alone)
    first, *others = [demo.request(OBJECT, seed, f"fan-{seed}") for seed in range(3)]
    first.siblings = others
    (token,) = demo.node.step([Scheduled(first, first.num_uncomputed_tokens)])
    assert token is not None
    found = [token.token_id, *(sibling.token_id for sibling in token.siblings)]
    assert found == [request.output_token_ids[0] for request in alone]


def test_nothing_is_kept_of_requests_that_are_done(demo: DemoModel) -> None:
    progress = GrammarProgress()
    requests = [demo.request(AB, 0, str(i)) for i in range(3)]
    progress.masks(requests)
    assert progress.num_answers == 3
    requests[0].finish_reason = FinishReason.STOP
    requests[1].is_cancelled = True
    progress.masks([])
    assert progress.num_answers == 1


def test_an_id_that_comes_again_is_another_answer(demo: DemoModel) -> None:
    progress = GrammarProgress()
    first, second = demo.request(AB, 0, "same"), demo.request("start: /cd/", 0, "same")
    first.output_token_ids += demo.ids("a")
    progress.masks([first])
    texts = {demo.tokenizer.decode([i]) for i in allowed(progress.masks([second]))}
    assert texts == {"c"}


@pytest.mark.parametrize("is_light", [True, False])
def test_a_grammar_that_cannot_be_followed_fails_its_request_alone(
    demo: DemoModel, is_light: bool
) -> None:
    good, bad = demo.request(AB, 0, "good"), demo.request(AB, 0, "bad")
    assert bad.grammar is not None
    bad.grammar = dataclasses.replace(bad.grammar, is_light=is_light)
    bad.output_token_ids += demo.ids("x")
    progress = GrammarProgress()
    with pytest.raises(GrammarFailed) as caught:
        progress.masks([good, bad])
    assert caught.value.request_ids == ["bad"]
    assert allowed(progress.masks([good])), "the others go on"


def test_one_that_comes_to_a_dead_end_later_fails_alone(demo: DemoModel) -> None:
    progress = GrammarProgress()
    good, bad = demo.request(AB, 0, "good"), demo.request(AB, 0, "bad")
    progress.masks([good, bad])
    bad.output_token_ids += demo.ids("x")
    with pytest.raises(GrammarFailed) as caught:
        progress.masks([good, bad])
    assert caught.value.request_ids == ["bad"]
    assert progress.masks([good]) is not None


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        (OBJECT, True),
        (AB, True),
        ("start: /[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}/", True),
        ("start: /((a{100}){100}){100}/", False),
        ('start: A{100}\nA: B{ ,100}\nB: "a"{ 1, 100 }', False),
        ('start: A~100\nA: B ~ 1..100\nB: "a"~100', False),
        ("start: /" + "a" * 5000 + "/", False),
    ],
)
def test_grammars_that_may_be_heavy_are_told(grammar: str, expected: bool) -> None:
    assert is_light(grammar) is expected


def heavy_answers(demo: DemoModel, *names: str) -> list[Request]:
    rows = [demo.request(AB, 0, name) for name in names]
    for row in rows:
        assert row.grammar is not None
        row.grammar = dataclasses.replace(row.grammar, is_light=False)
    return rows


def spin(until: Callable[[], bool]) -> None:
    while not until():
        pass


def test_a_mask_is_given_up_by_its_cpu_time(demo: DemoModel) -> None:
    release = threading.Event()

    class Busy(GrammarProgress):
        def write_mask(self, answer: Any, bits: np.ndarray) -> None:
            if answer.request.request_id == "slow":
                spin(release.is_set)
            super().write_mask(answer, bits)

    watchdog = threading.Timer(20.0, release.set)
    watchdog.start()
    try:
        with pytest.raises(GrammarFailed) as caught:
            Busy(mask_cpu_s=0.02).masks(heavy_answers(demo, "slow", "behind"))
        assert caught.value.request_ids == ["slow"]
        assert not release.is_set(), "nobody has waited for it until its end"
    finally:
        watchdog.cancel()
        release.set()


def test_many_masks_that_take_long_together_are_not_given_up(demo: DemoModel) -> None:

    class Work(GrammarProgress):
        def write_mask(self, answer: Any, bits: np.ndarray) -> None:
            end_s = time.thread_time() + 0.01
            spin(lambda: time.thread_time() > end_s)
            super().write_mask(answer, bits)

    rows = heavy_answers(demo, *map(str, range(20)))
    masks = Work(mask_cpu_s=0.05).masks(rows)
    assert all(allowed(masks, row) for row in range(20))


def test_one_that_takes_too_long_fails_alone(demo: DemoModel) -> None:
    """It is still at it when the others have their masks."""
    release = threading.Event()

    class Stuck(GrammarProgress):
        def write_mask(self, answer: Any, bits: np.ndarray) -> None:
            if answer.request.request_id == "slow":
                release.wait(60)
            else:
                super().write_mask(answer, bits)

    progress = Stuck(mask_s=0.05)
    rows = heavy_answers(demo, "slow", "behind", "too")
    try:
        with pytest.raises(GrammarFailed) as caught:
            progress.masks(rows)
        assert caught.value.request_ids == ["slow"]
        assert allowed(progress.masks(rows[1:]), 1)
        assert not release.is_set()
    finally:
        release.set()


def test_logits_beyond_the_tokenizer_are_never_chosen(demo: DemoModel) -> None:
    request = demo.request(OBJECT, 0, "object")
    request.grammar = compile_grammar(load_vocabulary(CHECKPOINT_PATH, 2100, END), OBJECT)
    masks = GrammarProgress().masks([request])
    assert masks is not None
    assert not masks.allowed(2100, torch.device("cpu"))[:, 2048:].any()
    assert masks.words_of(2100).shape == (1, 66)
