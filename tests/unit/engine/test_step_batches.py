"""Batches foreseen and batches laid out anew are what the plain way makes of the same plan."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.core import EngineCore
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.engine.steps.batch import Batch
from pdserve.shared.clock import ManualClock
from tests.fakes.runner import (
    FakeRunner,
    decode_policy,
)
from tests.matrix import examples
from tests.requests import make_request
from tests.unit.engine.batches import BLOCK, assert_same, plain_batch, step_batches


class Steps:
    """An engine's steps, each laid out both ways."""

    def __init__(self, num_blocks: int, budget: int = 16, batch: int = 8) -> None:
        self.core = EngineCore(
            Queues(BlockPool(num_blocks, BLOCK), ManualClock()),
            decode_policy(budget, batch),
            frozenset(),
        )
        self.batches = step_batches()
        self.runner = FakeRunner(BLOCK)
        self.batch: Batch | None = None  # of the last step

    def begin(self) -> list[Scheduled]:
        """Plan, lay out, foresee."""
        rows = self.core.begin_step()
        if rows:
            self.batch = self.batches.lay_out(rows)
            assert_same(self.batch, plain_batch(rows))
            before = plain_batch(rows)
            self.batches.foresee(rows)
            assert_same(self.batch, before)  # which is being read meanwhile
        return rows

    def end(self, rows: list[Scheduled]) -> None:
        """As the engine does."""
        for request in self.core.end_step(rows, self.runner.execute(rows), 0.0):
            self.core.forget(request)

    def run(self, num_steps: int) -> None:
        """So many."""
        for _ in range(num_steps):
            self.end(self.begin())


def decoding(steps: Steps, num_requests: int, max_tokens: int = 1000) -> list[Request]:
    """So many requests that have token 1."""
    requests = [
        make_request(3 + n, max_tokens=max_tokens, is_long=n % 2 == 1) for n in range(num_requests)
    ]
    for request in requests:
        steps.core.submit(request)
    while not all(request.output_token_ids for request in requests):
        steps.run(1)
    return requests


EVENTS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 20), st.integers(1, 12)),
    st.tuples(st.just("cancel"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("fail"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("preempt"), st.integers(0, 9), st.just(0)),
)


@settings(max_examples=examples(40))
@given(
    script=st.lists(st.lists(EVENTS, max_size=2), max_size=30),
    num_blocks=st.integers(9, 30),
    budget=st.integers(1, 20),
)
def test_whatever_happens_between_two_steps(
    script: list[list[tuple[str, int, int]]], num_blocks: int, budget: int
) -> None:
    steps = Steps(num_blocks, budget)
    core, num_steps = steps.core, 0
    for events in script:
        rows = steps.begin()
        num_steps += bool(rows)
        failed: list[Request] = []
        for kind, number, max_tokens in events:
            if kind == "submit":
                is_long = max_tokens % 2 == 1
                core.submit(make_request(number, max_tokens=max_tokens, is_long=is_long))
            elif kind == "cancel" and core.queues.running:
                running = core.queues.running
                core.cancel(running[number % len(running)].request_id)
            elif kind == "fail" and rows:
                failed.append(rows[number % len(rows)].request)
        if failed:
            core.abandon_step(rows, failed)
        else:
            steps.end(rows)
        for kind, number, _ in events:
            if kind == "preempt" and core.queues.running:
                core.queues.preempt(core.queues.running[number % len(core.queues.running)])
    assert steps.batches.num_foreseen + steps.batches.num_anew == num_steps


def test_other_blocks_for_as_many_tokens_are_noticed() -> None:
    """A request gave way and came back between two steps. No count tells."""
    steps = Steps(40)
    (request,) = decoding(steps, 1)
    steps.run(6)
    old = list(request.block_table)
    steps.core.pool.retain(old)  # so that it is given others
    steps.core.queues.preempt(request)
    request.block_table = steps.core.pool.allocate(len(old))
    request.num_computed_tokens = request.num_tokens - 1
    steps.core.queues.waiting.remove(request)
    steps.core.queues.running.append(request)
    num_foreseen = steps.batches.num_foreseen
    steps.run(1)
    assert steps.batches.num_foreseen == num_foreseen


def test_a_step_that_came_to_nothing_is_not_taken_for_one_that_did() -> None:
    steps = Steps(40)
    (request,) = decoding(steps, 1)
    steps.run(3)
    num_foreseen, num_tokens = steps.batches.num_foreseen, request.num_tokens
    steps.core.abandon_step(steps.begin(), [])
    steps.run(1)
    assert request.num_tokens == num_tokens + 1
    assert steps.batches.num_foreseen == num_foreseen + 1, "the step that was abandoned"


def test_steady_decoding_is_foreseen_step_for_step() -> None:
    steps = Steps(300)
    decoding(steps, 8)
    num_anew = steps.batches.num_anew
    steps.run(50)
    assert steps.batches.num_anew == num_anew


def test_a_step_in_which_somebody_comes_or_goes_is_the_only_one_laid_out_anew() -> None:
    steps = Steps(300)
    first, *_ = decoding(steps, 5)
    steps.run(3)
    num_anew = steps.batches.num_anew
    steps.core.cancel(first.request_id)
    steps.run(10)
    assert steps.batches.num_anew == num_anew + 1
    steps.core.submit(make_request(6))
    steps.run(2)  # its prompt; from then on it is as good as decoding
    assert steps.batches.num_anew == num_anew + 2


def test_memory_is_kept() -> None:
    steps = Steps(300, budget=200)
    for _ in range(8):
        steps.core.submit(make_request(20, max_tokens=1000))
    steps.run(3)
    num_growths, addresses = steps.batches.num_growths, set()
    for _ in range(15):
        steps.run(1)
        assert steps.batch is not None
        addresses.add(steps.batch.token_ids.data_ptr())
    assert len(addresses) == 2, "one is read while the other is written"
    assert steps.batches.num_growths == num_growths


def test_rows_of_an_adapter_follow_each_other() -> None:
    steps = Steps(200, budget=64)
    for n in range(8):
        steps.core.submit(make_request(3, adapter=("", "b", "a")[n % 3], max_tokens=20))
    steps.run(8)
    rows = steps.begin()
    names = [row.request.prompt.adapter for row in rows]
    assert names == ["", "", "", "a", "a", "b", "b", "b"]
    assert steps.batches.num_foreseen > 4
    steps.end(rows)
