"""Which drafts a step gets, and what is kept of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import inf
from types import FrameType

import pytest

from pdserve.engine.core import EngineCore
from pdserve.engine.drafts.source import Source
from pdserve.engine.drafts.speculation import MOST_OF_STREAM, Speculation
from pdserve.engine.drafts.texts import OwnText
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.lifecycle import Targets
from pdserve.measured.perf_model import StepShape
from pdserve.protocol import FinishReason
from pdserve.shared.clock import ManualClock
from tests.requests import make_request

EOS = frozenset({99})
REPEATED = [1, 2, 3, 4] * 4


class Decodes:
    """A policy of decodes only."""

    def plan(self, queues: Queues) -> list[Scheduled]:
        return queues.plan_decodes(64)


def flat(shape: StepShape) -> float:
    """Bound by memory: a token more costs nothing."""
    return 1.0


def by_tokens(shape: StepShape) -> float:
    """Bound by arithmetic."""
    return float(shape.num_tokens)


def core_of(
    step_s=flat, num_blocks: int = 100, block_size: int = 4, sources: Sequence[Source] = ()
) -> EngineCore:
    pool = BlockPool(num_blocks, block_size)
    core = EngineCore(Queues(pool, ManualClock()), Decodes(), EOS)
    core.speculate = Speculation(pool, step_s, 256, sources or [OwnText()])
    return core


def adopted(core: EngineCore, prompt: list[int], output: list[int], **sampling: object) -> Request:
    request = make_request(prompt, output, **{"max_tokens": 1000} | sampling)
    request.num_computed_tokens = request.num_tokens - 1
    request.block_table = core.pool.allocate(core.pool.blocks_for(request.num_tokens))
    core.adopt(request)
    return request


def step(core: EngineCore, says: list[int]) -> list[Request]:
    """A step of one request, which would say these tokens next, one after the other."""
    rows = core.begin_step()
    (row,) = rows
    drafts = list(row.request.draft)
    drawn = [says[0]]
    for place, draft in enumerate(drafts):
        is_right = drawn == says[: place + 1] and draft == says[place]
        drawn.append(says[place + 1] if is_right and place + 1 < len(says) else 1000 + place)
    first, *after = map(SampledToken, drawn)
    token = SampledToken(first.token_id, after=tuple(after))
    return core.end_step(rows, core.accepted(rows, [token]), 0.0)


def test_right_drafts_are_output_and_the_token_behind_them_too() -> None:
    core = core_of()
    request = adopted(core, REPEATED, [1])
    step(core, [2, 3, 4, 1, 7, 7, 7])
    assert request.output_token_ids == [1, 2, 3, 4, 1, 7]
    assert request.num_uncomputed_tokens == 1
    assert request.draft == ()


def test_of_wrong_drafts_one_token_is_left() -> None:
    core = core_of()
    request = adopted(core, REPEATED, [1])
    step(core, [9])
    assert request.output_token_ids == [1, 9]
    assert request.num_uncomputed_tokens == 1


def test_blocks_with_kv_of_refused_drafts_are_not_published() -> None:
    core = core_of(block_size=4)
    request = adopted(core, REPEATED, [1])
    step(core, [9])
    request.extend_hashes(request.num_tokens, 4)
    assert len(core.pool.match_prefix(request.block_hashes)) == request.num_computed_tokens // 4


@pytest.mark.parametrize(
    ("sampling", "output", "reason"),
    [
        ({"max_tokens": 4}, [1, 2, 3, 4], FinishReason.LENGTH),
        ({"stop_token_ids": [3]}, [1, 2, 3], FinishReason.STOP),
        ({"stop_token_ids": [3], "min_tokens": 4}, [1, 2, 3, 4, 1, 2, 3], FinishReason.STOP),
    ],
)
def test_nothing_comes_after_the_end(
    sampling: dict[str, object], output: list[int], reason: FinishReason
) -> None:
    core = core_of()
    request = adopted(core, REPEATED, [1], **sampling)
    (done,) = step(core, [2, 3, 4, 1] * 4)
    assert done is request
    assert request.output_token_ids == output
    assert request.finish_reason is reason


def test_a_stream_that_is_told_to_leave_goes_with_its_next_token() -> None:
    core = core_of()
    request = adopted(core, REPEATED, [1])
    rows = core.begin_step()
    request.leg_token_limit = 2  # while the step runs
    after = tuple(map(SampledToken, [3, 4, 1, 2] * 4))[: len(request.draft)]
    core.end_step(rows, core.accepted(rows, [SampledToken(2, after=after)]), 0.0)
    assert request.output_token_ids == [1, 2]
    assert request.handed_off_at == request.num_computed_tokens


def test_a_dropped_step_leaves_no_drafts() -> None:
    core = core_of()
    request = adopted(core, REPEATED, [1])
    rows = core.begin_step()
    assert request.draft
    core.abandon_step(rows, [])
    assert request.draft == ()
    assert request.output_token_ids == [1]


def test_drafts_take_no_block_that_a_stream_needs() -> None:
    core = core_of(num_blocks=5, block_size=4)  # 17 tokens have 5
    request = adopted(core, REPEATED, [1])
    core.begin_step()
    assert len(request.draft) == 3  # in its last block


def test_there_are_none_where_each_token_costs_as_much_as_a_step() -> None:
    core = core_of(by_tokens)
    request = adopted(core, REPEATED, [1])
    core.begin_step()
    assert request.draft == ()


def test_a_promise_bounds_the_step() -> None:
    core = core_of(lambda shape: 0.1 if shape.num_tokens <= 6 else 0.12)
    request = adopted(core, REPEATED, [1])
    core.begin_step()
    assert len(request.draft) == MOST_OF_STREAM
    core.abandon_step([Scheduled(request, 1)], [])
    request.targets = Targets(tpot_s=0.11)
    core.begin_step()
    assert len(request.draft) == 5


def test_who_has_nothing_to_guess_is_held_up_little() -> None:
    core = core_of(lambda shape: 1.0 + 0.1 * shape.num_tokens)
    request = adopted(core, REPEATED, [1])
    core.begin_step()
    alone = len(request.draft)
    core.abandon_step([Scheduled(request, 1)], [])
    adopted(core, list(range(20, 40)), [50])
    core.begin_step()
    assert len(request.draft) == 2 < alone  # 1.2 s of two tokens become 1.4 s, not 1.5 s


def test_who_has_drafts_pays_for_the_time_that_they_add() -> None:
    core = core_of(lambda shape: 1.0 + 0.01 * shape.num_tokens)
    charged: dict[Request, float] = {}
    core.speculate.charge = charged.__setitem__  # type: ignore[attr-defined]
    repeats, twice = adopted(core, REPEATED, [1]), adopted(core, REPEATED[:8], [1])
    adopted(core, list(range(20, 40)), [50])
    core.begin_step()
    assert repeats.draft
    expected = {one: 0.01 * len(one.draft) for one in (repeats, twice) if one.draft}
    assert charged == pytest.approx(expected)


def calls_of(core: EngineCore, rows: list[Scheduled]) -> int:
    """Functions of Python that are called to give these rows drafts."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    core.speculate(rows)
    sys.setprofile(None)
    return calls


def test_text_that_cannot_be_guessed_costs_next_to_nothing() -> None:
    """Of 64 streams, where none says what was said before, or one may."""
    core = core_of(num_blocks=1000)
    streams = [adopted(core, list(range(100 + n, 120 + n)), [50]) for n in range(0, 64 * 20, 20)]
    rows = [Scheduled(request, 1) for request in streams]
    core.speculate(rows)
    assert calls_of(core, rows) <= 2
    adopted(core, REPEATED[:7], [3])
    rows.append(Scheduled(core.queues.running[-1], 1))
    core.speculate(rows)
    assert calls_of(core, rows) < 20
    assert not any(request.draft for request in core.queues.running), "one token of 65 is no gain"


def test_who_guesses_wrong_is_asked_less_and_less() -> None:
    core = core_of(lambda shape: 1.0 + 0.1 * shape.num_tokens)
    request = adopted(core, REPEATED, [1])
    numbers = []
    for _ in range(40):
        core.begin_step()
        numbers.append(len(request.draft))
        core.abandon_step([Scheduled(request, 1)], [])
        if numbers[-1]:
            request.guesses.compared(numbers[-1], 0)
    assert numbers[0] > numbers[5]
    assert sum(numbers[20:]) <= 20
    assert request.targets.tpot_s == inf
