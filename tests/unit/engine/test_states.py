"""Blocks of requests' states: taken with a request's admission, and given back with its others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from pdserve.engine.core import EngineCore
from pdserve.engine.engine import Engine
from pdserve.engine.interface import OthersSampled
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.request import SampledToken, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import GrammarFailed, RequestsFailed, UnusableLogits
from tests.fakes.runner import FakeRunner, Observer, decode_policy, expected_output
from tests.requests import make_request

BLOCK, STATE = 4, 3


def make_core(num_blocks: int) -> EngineCore:
    pool = BlockPool(num_blocks, BLOCK, prefix_cache=False, state_blocks=STATE)
    return EngineCore(Queues(pool, ManualClock()), decode_policy(8, 4), frozenset())


def test_a_request_is_let_in_with_room_for_its_state() -> None:
    core = make_core(9)
    first, second = make_request(2 * BLOCK, max_tokens=1), make_request(BLOCK, max_tokens=1)
    for request in (first, second):
        core.submit(request)
    assert core.queues.admit(first)
    assert len(set(first.block_table) | set(first.state_blocks)) == 2 + STATE
    assert not core.queues.admit(second), "four blocks are free, and it takes one, a next and three"
    core.cancel(first.request_id)
    assert core.pool.num_free == 9
    assert core.queues.admit(second)
    core.queues.preempt(second)
    assert (second.block_table, second.state_blocks) == ([], [])
    assert core.pool.num_free == 9
    core.pool.check_integrity()


def test_after_a_failed_step_states_are_computed_anew() -> None:
    """A step changes them for good: it cannot be repeated, as one that only writes KV.

    Nobody gives up blocks for that: other nodes may have been told of those of prefill legs.
    """
    core = make_core(20)
    requests = [make_request(6, max_tokens=2) for _ in range(3)]
    for request in requests:
        core.submit(request)
        assert core.queues.admit(request)
        request.num_computed_tokens = 4
    rows = [Scheduled(request, 2) for request in requests]
    tables = [(list(each.block_table), list(each.state_blocks)) for each in requests]
    core.abandon_step(rows, requests[:1])
    assert core.queues.running == requests[1:]
    assert [each.num_computed_tokens for each in requests[1:]] == [0, 0]
    assert [(each.block_table, each.state_blocks) for each in requests[1:]] == tables[1:]
    assert core.pool.num_free == 20 - 2 * (2 + STATE)


class OneBadRequest(FakeRunner):
    """Has no token for one of the requests in its third step, or no mask."""

    def __init__(self, bad: str, kind: type[RequestsFailed]) -> None:
        super().__init__(BLOCK)
        self.bad = bad
        self.kind = kind

    def execute(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> list[SampledToken | None]:
        sampled = super().execute(rows, progress)
        if len(self.steps) == 3:
            if self.kind is not OthersSampled:
                raise self.kind("why", [self.bad])
            left = [
                SampledToken(-1) if row.request.request_id == self.bad else token
                for row, token in zip(rows, sampled, strict=True)
            ]
            raise OthersSampled("why", [self.bad], left)
        return sampled


@pytest.mark.parametrize("kind", [OthersSampled, GrammarFailed, UnusableLogits])
async def test_who_asks_for_what_cannot_be_makes_nobody_begin_anew(
    kind: type[RequestsFailed],
) -> None:
    """Else anybody could, time after time, have all states computed again that are beside.

    Only if the model itself has failed they are, and even then nobody gives way.
    """
    pool = BlockPool(60, BLOCK, prefix_cache=False, state_blocks=STATE)
    engine = Engine(Queues(pool, ManualClock()), decode_policy(64, 8), frozenset())
    requests = [make_request(6, max_tokens=5) for _ in range(4)]
    bad, others = requests[1], [*requests[:1], *requests[2:]]
    runner, observer = OneBadRequest(bad.request_id, kind), Observer()
    for request in requests:
        engine.submit(request)
    running = asyncio.create_task(engine.run(runner, observer))
    async with asyncio.timeout(30):
        await observer.until(lambda: len(observer.done) == len(others))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert [request for request, _ in observer.failed] == [bad]
    assert [r.output_token_ids for r in others] == [expected_output(r) for r in others]
    num_first = sum(number == 6 for step in runner.steps for _, number in step)
    num_again = sum(number > 1 for step in runner.steps[3:] for _, number in step)
    assert (num_first, num_again) == (4, len(others) * (kind is UnusableLogits))
    assert engine.queues.preemptions.statistics.total == 0
    assert pool.num_free == 60
    pool.check_integrity()
