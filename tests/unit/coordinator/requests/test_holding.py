"""Token 1 is held back while its decode node lets others wait, and no longer than it may be."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from coordinator.admission import Admission, WaitingLine
from coordinator.generation import GenerationRequest
from coordinator.nodes.registry import Registry
from coordinator.requests.running import RunningRequest
from coordinator.routing import Router
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import (
    DecodeLeg,
    FinishReason,
    NodeRole,
    Prompt,
    SamplingParams,
    Slo,
    TokenBatch,
    TokenEvent,
)
from pdserve.settings.config import Mode
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import DeadlineExceeded, RequestCancelled
from tests.fakes.members import join, made_flow, said_to

# What nobody reaches but by the manual clock: a timer of the event loop's never ends within a test.
SLO = Slo(name="a", ttft_s=60.0, tpot_s=0.1, hold_s=50.0)


class Told(list[int]):
    """Tokens of a request as its client sees them, and what it ended with."""

    def __init__(self, running: RunningRequest) -> None:
        super().__init__()
        self.error: Exception | None = None
        running.listen(self._hear)

    def _hear(self, event: TokenEvent | Exception) -> None:
        if isinstance(event, Exception):
            self.error = event
        else:
            self.extend(event.token_ids)


class Pair:
    """A flow over one node of each pool."""

    def __init__(self, mode: Mode = "disaggregated") -> None:
        self.clock = ManualClock(1000.0)
        self.metrics = CoordinatorMetrics()
        self.registry = Registry()
        router = Router(self.registry, mode, clock=self.clock)
        admission = Admission(WaitingLine[RunningRequest](2))
        self.flow = made_flow(
            self.registry, router, admission, metrics=self.metrics, clock=self.clock
        )
        self.prefill = join(self.registry, "p", NodeRole.PREFILL)
        self.decode = join(self.registry, "d", NodeRole.DECODE)
        self.running: dict[str, RunningRequest] = {}

    def start(self, request_id: str, slo: Slo = SLO, **fields: float) -> Told:
        request = GenerationRequest(
            request_id=request_id,
            prompt=Prompt([1, 2, 3]),
            sampling=SamplingParams(max_tokens=8),
            slo=slo,
            **fields,  # type: ignore[arg-type]
        )
        self.running[request_id] = self.flow.start(request)
        return Told(self.running[request_id])

    def token(self, request_id: str, index: int, *, last: bool = False) -> None:
        event = TokenEvent(
            request_id=request_id,
            index=index,
            token_ids=[index],
            finish_reason=FinishReason.STOP if last else None,
        )
        sender = self.prefill if index == 0 else self.decode
        self.flow.tokens(TokenBatch(events=[event]), sender)

    def somebody_waits(self, seconds: float) -> None:
        """Token 1 of another one was here so long ago."""
        self.start("waits", Slo())
        self.token("waits", 0)
        self.clock.advance(seconds)

    def held(self) -> float:
        """Requests whose token 1 was held back and is told by now."""
        lines = self.metrics.exposition().decode().splitlines()
        name = "pdserve_token_one_held_seconds_count "
        return next(float(line.split()[-1]) for line in lines if line.startswith(name))


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    for running in pair.running.values():
        running.cancel("the test is over")
    assert pair.flow.num_inflight == 0


async def test_token_one_comes_with_token_two_where_others_wait(pair: Pair) -> None:
    pair.somebody_waits(0.5)
    told = pair.start("r")
    pair.token("r", 0)
    assert told == []
    assert pair.running["r"].has_token_one
    pair.clock.advance(2.0)
    pair.token("r", 1)
    assert told == [0, 1]
    assert pair.held() == 1
    pair.token("r", 2)
    assert told == [0, 1, 2]


async def test_token_two_may_be_the_sooner_one(pair: Pair) -> None:
    pair.somebody_waits(0.5)
    told = pair.start("r")
    pair.token("r", 1)
    pair.token("r", 0)
    assert told == [0, 1]


@pytest.mark.parametrize(
    ("waits_s", "slo"),
    [
        pytest.param(0.4, SLO, id="a handoff takes as long as that"),
        pytest.param(9.0, Slo(), id="nothing is promised"),
        pytest.param(9.0, Slo(ttft_s=60.0, tpot_s=0.1), id="its class wants it at once"),
        pytest.param(9.0, Slo(ttft_s=60.0, tpot_s=3.0, hold_s=50.0), id="there is time for it"),
    ],
)
async def test_token_one_comes_at_once(pair: Pair, waits_s: float, slo: Slo) -> None:
    pair.somebody_waits(waits_s)
    told = pair.start("r", slo)
    pair.token("r", 0)
    assert told == [0]
    assert pair.held() == 0


async def test_nobody_waits_who_has_token_two_or_is_gone(pair: Pair) -> None:
    pair.somebody_waits(0.5)
    pair.token("waits", 1)
    told = pair.start("r")
    pair.token("r", 0)
    assert told == [0]
    pair.clock.advance(0.5)
    pair.running["r"].cancel("gone")
    told = pair.start("next")
    pair.token("next", 0)
    assert told == [0]


async def test_an_end_at_token_one_is_told_at_once(pair: Pair) -> None:
    pair.somebody_waits(0.5)
    told = pair.start("r")
    pair.token("r", 0, last=True)
    assert told == [0]


async def test_it_is_told_when_the_class_allows_no_more(pair: Pair) -> None:
    pair.somebody_waits(0.5)
    told = pair.start("r", Slo(ttft_s=1.0, tpot_s=0.1, hold_s=0.05), waited_s=0.04)
    pair.token("r", 0)
    assert told == []
    hold = pair.running["r"]._showing._hold
    assert hold is not None
    await _until(hold.timer.when())
    assert told == [0]
    late = pair.start("late", Slo(ttft_s=1.0, tpot_s=0.1, hold_s=0.05), waited_s=0.05)
    pair.token("late", 0)
    assert late == [0]


async def test_the_time_on_the_nodes_counts(pair: Pair) -> None:
    pair.somebody_waits(0.5)
    told = pair.start("r")
    pair.clock.advance(50.0)
    pair.token("r", 0)
    assert told == [0]


async def test_an_error_comes_behind_it(pair: Pair) -> None:
    pair.somebody_waits(0.5)
    told = pair.start("r")
    pair.token("r", 0)
    pair.running["r"].cancel("enough")
    assert told == [0]
    assert isinstance(told.error, RequestCancelled)


async def test_the_deadline_holds(pair: Pair) -> None:
    pair.somebody_waits(0.5)
    told = pair.start("r", deadline_s=0.01)
    pair.token("r", 0)
    await _until(pair.running["r"]._deadline.when())
    assert told == [0]
    assert isinstance(told.error, DeadlineExceeded)


async def test_scores_of_the_prompt_are_not_taken_for_token_one(pair: Pair) -> None:
    pair.somebody_waits(0.5)
    told = pair.start("r")
    scores = TokenEvent(request_id="r", index=0, token_ids=[])
    pair.flow.tokens(TokenBatch(events=[scores]), pair.prefill)
    pair.token("r", 0)
    assert told == []
    pair.token("r", 1)
    assert told == [0, 1]


async def test_a_listener_may_come_while_it_is_held_back(pair: Pair) -> None:
    pair.somebody_waits(0.5)
    pair.start("r")
    pair.token("r", 0)
    told = Told(pair.running["r"])
    assert told == []
    pair.token("r", 1)
    assert told == [0, 1]


async def test_the_decode_node_is_told_how_long(pair: Pair) -> None:
    pair.start("r", waited_s=10.0)
    (leg,) = said_to(pair.decode)
    assert isinstance(leg, DecodeLeg)
    assert leg.slo.hold_s == 40.0


async def _until(when_s: float) -> None:
    """The event loop has done what was due then."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    loop.call_at(when_s, done.set_result, None)
    await done
