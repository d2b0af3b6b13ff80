"""What the draft model computes before a step, and when it is not worth it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest

from pdserve.engine.core import EngineCore
from pdserve.engine.drafts.model.depth import MOST, best_depth
from pdserve.engine.drafts.model.draft_model import DraftModel
from pdserve.engine.drafts.model.source import ModelSource
from pdserve.engine.drafts.speculation import Speculation
from pdserve.engine.interface import Sampled, shape_of
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.lifecycle import Targets
from pdserve.measured.perf_model import PerfModel, StepShape
from pdserve.protocol import StepCosts
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import UnusableLogits
from tests.requests import make_request

Says = Callable[[Sequence[int]], int]  # tokens so far |-> the next one


def counts_up(tokens: Sequence[int]) -> int:
    return (tokens[-1] + 1) % 1000


def stutters(tokens: Sequence[int]) -> int:
    return tokens[-1]


def flat(shape: StepShape) -> float:
    """Bound by memory: a token more costs nothing."""
    return 1.0


class Model:
    """A runner of a model that says what a function says, as fast as predicted; checks its KV."""

    def __init__(self, says: Says, perf: PerfModel, block_size: int = 4) -> None:
        self.says = says
        self.now_s = 0.0
        self._perf = perf
        self.rows: list[list[int]] = []  # tokens of each row, by step
        self.error: Exception | None = None
        self._block_size = block_size
        self._kv: dict[tuple[int, int], tuple[int, ...]] = {}  # slot |-> tokens up to there

    def prepare(self, rows: Sequence[Scheduled]) -> Callable[[], Sampled]:
        return lambda: [self._compute(row) for row in rows] if self._note(rows) else []

    def _note(self, rows: Sequence[Scheduled]) -> bool:
        if self.error is not None:
            raise self.error
        self.rows.append([row.num_tokens for row in rows])
        self.now_s += self._perf.step_s(shape_of(rows))
        return True

    def _compute(self, row: Scheduled) -> SampledToken | None:
        request, begin = row.request, row.request.num_computed_tokens
        tokens = request.token_slice(0, request.num_tokens)
        for position in range(begin + row.num_tokens):
            block = request.block_table[position // self._block_size]
            slot, so_far = (block, position % self._block_size), tuple(tokens[: position + 1])
            if position < begin:
                assert self._kv[slot] == so_far, "the KV of what it goes on from"
            self._kv[slot] = so_far
        return SampledToken(self.says(tokens)) if row.samples else None


class Node:
    """A core that counts up, and what drafts for it."""

    def __init__(
        self,
        says: Says = counts_up,
        draft_s: float = 0.01,
        step_s: Callable[[StepShape], float] = flat,
        num_blocks: int = 200,
    ) -> None:
        self.pool = BlockPool(num_blocks, 4)
        self.perf = PerfModel(StepCosts(knot_tokens=[1, 64], knot_s=[draft_s, 2 * draft_s]))
        self.model = Model(says, self.perf)
        pool = BlockPool(1000, 4)
        self.core = EngineCore(Queues(pool, ManualClock()), Decodes(), frozenset())
        now = partial(getattr, self.model, "now_s")
        draft = DraftModel(self.model, self.pool, 64, self.perf, 2000, 10_000, now)
        self.source = ModelSource(draft, self.core.queues, step_s, 64)
        self.core.speculate = Speculation(pool, step_s, 256, [self.source])

    def adopt(self, prompt: list[int], **sampling: object) -> Request:
        request = make_request(prompt, [prompt[-1] + 1], **{"max_tokens": 10_000} | sampling)
        request.num_computed_tokens = request.num_tokens - 1
        request.block_table = self.core.pool.allocate(self.core.pool.blocks_for(request.num_tokens))
        self.core.adopt(request)
        return request

    def step(self) -> int:
        """A step of all streams; how many drafts it had."""
        if (drafts := self.source.plan()) is not None:
            drafts()
        rows = self.core.begin_step()
        sampled = []
        for request, _ in rows:
            said = [*request.output_token_ids, *request.draft]
            ends = range(len(said) - len(request.draft), len(said) + 1)
            drawn = [counts_up(said[:end]) for end in ends]
            first, *after = map(SampledToken, drawn)
            sampled.append(SampledToken(first.token_id, after=tuple(after)))
        number = sum(len(row.request.draft) for row in rows)
        for request in self.core.end_step(rows, self.core.accepted(rows, sampled), 0.0):
            self.core.forget(request)
        return number


class Decodes:
    """A policy of decodes only."""

    def plan(self, queues: Queues) -> list[Scheduled]:
        return queues.plan_decodes(64)


def test_right_drafts_make_a_step_say_more_and_their_kv_is_kept() -> None:
    node = Node()
    request = node.adopt([1, 2, 3])
    assert node.step() == 0  # nobody has asked for its drafts before
    drafted = [node.step() for _ in range(9)]
    assert drafted == sorted(drafted)
    assert drafted[0] > 0
    assert drafted[-2:] == [MOST, MOST]
    assert request.output_token_ids == list(range(4, 4 + 11 + sum(drafted)))
    # The last draft and the token behind it; then one at a time.
    assert node.model.rows[-MOST:] == [[2]] + [[1]] * (MOST - 1)


def test_kv_behind_wrong_drafts_is_computed_again() -> None:
    node = Node(lambda tokens: tokens[-1] + (1 if tokens[-1] % 3 else 5))
    request = node.adopt([1, 2, 3])
    for _ in range(30):
        node.step()
    assert request.output_token_ids == list(range(4, 4 + len(request.output_token_ids)))
    assert len(request.output_token_ids) > 45


def test_streams_are_drafted_for_together() -> None:
    node = Node()
    for first in (1, 100, 200):
        node.adopt([first, first + 1])
    for _ in range(12):
        node.step()
    assert node.step() == 3 * MOST
    assert node.model.rows[0] == [4, 4, 4]
    assert node.model.rows[-MOST:] == [[2, 2, 2]] + [[1, 1, 1]] * (MOST - 1)


def test_who_is_wrong_is_asked_no_more_and_tried_again_later() -> None:
    node = Node(stutters, draft_s=0.2)
    node.adopt([1, 2, 3])
    drafted = [node.step() for _ in range(3000)]
    assert sum(drafted[:40]) > 0
    assert sum(number > 0 for number in drafted[40:1000]) <= 20
    assert len(node.model.rows) < 400


def test_who_costs_as_much_as_it_saves_is_not_asked() -> None:
    node = Node(draft_s=1.0)
    node.adopt([1, 2, 3])
    assert sum(node.step() for _ in range(10)) == 0
    assert node.model.rows == []


def test_a_prompt_is_computed_in_slices_that_hold_nobody_up() -> None:
    node = Node(draft_s=0.1)
    node.adopt(list(range(100)))
    drafted = [node.step() for _ in range(6)]
    assert drafted[:3] == [0, 0, 0]
    assert drafted[-1] > 0
    slices = [rows[0] for rows in node.model.rows if rows[0] > 16]
    assert sum(slices) > 80
    assert all(node.perf.prefill_s(size, 0, size) <= 0.2 for size in slices)


def test_a_prompt_is_not_computed_for_a_short_answer() -> None:
    node = Node(draft_s=0.1)
    node.adopt(list(range(900)), max_tokens=4)
    assert [node.step() for _ in range(3)] == [0, 0, 0]
    assert node.model.rows == []


def test_prompts_that_wait_are_not_held_up() -> None:
    node = Node()
    node.adopt([1, 2, 3])
    node.step()
    node.core.submit(make_request([7, 8]))
    assert node.source.plan() is None


def test_a_promise_bounds_the_drafts() -> None:
    node = Node(draft_s=0.1)
    request = node.adopt([1, 2, 3])
    request.targets = Targets(tpot_s=1.35)
    node.step()
    assert 1 <= node.step() <= 3


def test_who_finds_no_room_and_who_ends_leaves_it_to_others() -> None:
    node = Node(num_blocks=24)
    for first in (1, 50):
        node.adopt([first, first + 1])
    drafted = [node.step() for _ in range(10)]
    assert max(drafted) > MOST  # both
    assert 0 < drafted[-1] <= MOST  # one of them
    assert node.pool.num_free < 12
    for request in list(node.core.queues.running):
        node.core.cancel(request.request_id)
    assert node.source.plan() is None
    assert node.pool.num_free == node.pool.num_blocks


@pytest.mark.parametrize("error", [RuntimeError("broken"), UnusableLogits("nan", ["odd"])])
def test_a_draft_model_that_fails_costs_drafts_and_nothing_else(error: Exception) -> None:
    node = Node()
    request = node.adopt([1, 2, 3], request_id="odd")
    node.step()
    node.model.error = error
    assert node.step() == 0
    node.model.error = None
    assert [node.step() for _ in range(3)] == [0, 0, 0]
    assert request.output_token_ids == [4, 5, 6, 7, 8, 9]


def test_ids_that_one_model_lacks_end_its_drafts() -> None:
    node = Node(lambda tokens: 2500)
    node.adopt([1, 2, 3])
    node.step()
    assert node.step() == 0
    other = Node()
    other.adopt([1, 2, 2001])
    other.step()
    assert other.source.plan() is None


def test_the_depth_follows_time_and_luck() -> None:
    shape = StepShape(1, 1, 0, 10)
    depths = [
        best_depth(shape, [likely], flat, lambda number: 0.1 * number, 9.0).num_drafts
        for likely in (0.05, 0.3, 0.6, 0.95)
    ]
    assert depths == sorted(depths)
    assert depths[0] == 0 < depths[1] < depths[3] == MOST
    assert best_depth(shape, [0.95], flat, lambda number: 0.1 * number, 1.25).num_drafts == 2
    assert best_depth(shape, [], flat, lambda number: 0.0, 9.0) == (0, 1.0)
