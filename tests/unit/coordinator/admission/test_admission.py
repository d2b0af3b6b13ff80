"""Who is dispatched, who waits and who is refused: a manual clock and made-up predictions."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.admission import Admission, Admit, Refuse, Wait, WaitingLine
from coordinator.admission.decisions import Awaited
from coordinator.admission.in_flight import PRESENCE_S
from coordinator.admission.policy import BACKLOG_S, HYSTERESIS, UNFORESEEN_S
from coordinator.admission.slack import HIGHEST, HIGHEST_TPOT_MARGIN, LOWEST, Margin
from pdserve.protocol import Slo
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import SloUnreachable

INTERACTIVE = Slo(name="interactive", priority=2, ttft_s=2.0, tpot_s=0.1)
STANDARD = Slo(name="standard", priority=1, ttft_s=10.0, tpot_s=0.25)
BATCH = Slo(name="batch")


@dataclass(frozen=True)
class Predicted:
    """What a router would say."""

    ttft_s: float = 0.5
    tpot_s: float = 0.02
    idle_ttft_s: float = 0.5
    idle_tpot_s: float = 0.02
    prompt_tokens: int = 100
    uncached_tokens: int = 100
    output_tokens: int = 20


IDLE = Predicted()


class Door:
    """An admission, its line and a clock."""

    def __init__(
        self, *, max_waiting: int = 4, max_inflight: int = 100, refuses: bool = True
    ) -> None:
        self.clock = ManualClock(1000.0)
        self.line = WaitingLine[Slo](max_waiting)
        self.admission = Admission(self.line, max_inflight=max_inflight, refuses=refuses)

    def decide(
        self, slo: Slo, predicted: Predicted = IDLE, num_answers: int = 1
    ) -> Admit | Wait | Refuse:
        return self.admission.decide(slo, predicted, self.clock.now(), num_answers=num_answers)

    def dispatch(self, request_id: str, slo: Slo, predicted: Predicted = IDLE) -> None:
        self.admission.dispatched(request_id, slo, predicted, self.clock.now())

    def wait_in_line(self, request_id: str) -> None:
        self.admission.wait(request_id, BATCH, BATCH, self.clock.now(), Wait())


def queued(seconds: float) -> Predicted:
    """Behind so much other work."""
    return Predicted(ttft_s=IDLE.idle_ttft_s + seconds)


def refused(decision: Admit | Wait | Refuse) -> SloUnreachable:
    assert isinstance(decision, Refuse)
    assert isinstance(decision.error, SloUnreachable)
    return decision.error


# ---- promises ----------------------------------------------------------------------------------


def test_what_fits_is_admitted_as_it_is() -> None:
    assert Door().decide(INTERACTIVE, queued(1.4)) == Admit(INTERACTIVE)


def test_a_ttft_that_would_be_missed_is_refused_until_the_queue_has_drained() -> None:
    door = Door()
    late = queued(3.0)  # with 1.5 s of room
    error = refused(door.decide(INTERACTIVE, late))
    assert "token 1 must be within 2 s for class 'interactive'" in error.message
    assert "3.5 s are predicted" in error.message
    drained = queued(3.0 - error.retry_after_s)  # a queue gets shorter by a second a second
    assert isinstance(door.decide(INTERACTIVE, queued(3.0 - error.retry_after_s + 0.01)), Refuse)
    assert isinstance(door.decide(INTERACTIVE, drained), Admit)


def test_a_tpot_that_would_be_missed_is_refused_until_enough_decodes_are_over() -> None:
    door = Door()
    asked: list[float] = []

    def tpot_within_s(tpot_s: float) -> float:
        asked.append(tpot_s)
        return 12.3

    slow = Predicted(tpot_s=0.105)
    decision = door.admission.decide(INTERACTIVE, slow, door.clock.now(), tpot_within_s)
    assert refused(decision).retry_after_s == 12.3
    assert isinstance(decision, Refuse)
    assert decision.reason == "tpot"
    (limit_s,) = asked  # the answer must be about a TPOT that will then be taken
    assert isinstance(door.decide(INTERACTIVE, Predicted(tpot_s=limit_s)), Admit)


def test_a_time_beyond_all_forecasts_is_told_as_such() -> None:
    assert refused(Door().decide(INTERACTIVE, Predicted(tpot_s=1e3))).retry_after_s == UNFORESEEN_S


def test_a_tpot_may_be_used_up() -> None:
    """Nodes have a safety of their own."""
    door = Door()
    assert isinstance(door.decide(INTERACTIVE, Predicted(tpot_s=0.1 - 1e-6)), Admit)
    assert isinstance(door.decide(INTERACTIVE, Predicted(tpot_s=0.1 + 1e-6)), Refuse)


def test_the_margin_of_a_tpot_does_not_shut_the_door() -> None:
    door = Door()
    for number in range(100):  # all of them much later than predicted
        request_id, predicted = f"r{number}", Predicted(tpot_s=0.05)
        door.admission.dispatched(request_id, INTERACTIVE, predicted, 0.0)
        door.admission.first_token(request_id, 0.0)
        door.admission.ended(request_id, 10.0, num_tokens=11)
    idle_s = IDLE.idle_tpot_s
    just_fits_s = idle_s + (0.1 - idle_s) / HIGHEST_TPOT_MARGIN
    assert isinstance(door.decide(INTERACTIVE, Predicted(tpot_s=just_fits_s - 1e-6)), Admit)
    assert isinstance(door.decide(INTERACTIVE, Predicted(tpot_s=just_fits_s + 1e-6)), Refuse)


def test_a_refused_class_is_taken_again_only_below_a_margin_and_others_do_not_care() -> None:
    door = Door()
    room_s = INTERACTIVE.ttft_s - IDLE.idle_ttft_s
    almost = queued(room_s * (1 - HYSTERESIS / 2))
    assert isinstance(door.decide(INTERACTIVE, almost), Admit)
    assert isinstance(door.decide(INTERACTIVE, queued(room_s * 1.01)), Refuse)
    assert isinstance(door.decide(INTERACTIVE, almost), Refuse)
    assert isinstance(door.decide(STANDARD, almost), Admit)
    assert isinstance(door.decide(INTERACTIVE, queued(room_s * 0.89)), Admit)
    assert isinstance(door.decide(INTERACTIVE, almost), Admit)


def test_a_long_prompt_is_admitted_by_idle_nodes_even_after_a_refusal() -> None:
    door = Door()
    tight = {"idle_ttft_s": 1.95, "idle_tpot_s": 0.02}  # more than nine tenths of the promise
    assert isinstance(door.decide(INTERACTIVE, Predicted(ttft_s=2.5, **tight)), Refuse)
    assert isinstance(door.decide(INTERACTIVE, Predicted(ttft_s=1.95, **tight)), Admit)


def test_nothing_is_refused_that_nothing_is_known_of() -> None:
    assert isinstance(Door().decide(INTERACTIVE, Predicted(0.0, 0.0, 0.0, 0.0)), Admit)


def test_refusals_can_be_turned_off() -> None:
    door = Door(refuses=False)
    assert door.decide(INTERACTIVE, queued(99.0)) == Admit(INTERACTIVE)
    door.dispatch("i", INTERACTIVE)
    assert door.decide(BATCH, queued(99.0)) == Admit(BATCH)


@pytest.mark.parametrize(
    "hopeless",
    [
        Predicted(ttft_s=3.0, idle_ttft_s=2.5),
        Predicted(tpot_s=0.2, idle_tpot_s=0.15),
    ],
)
def test_what_even_idle_nodes_could_not_keep_is_served_without_a_promise(
    hopeless: Predicted,
) -> None:
    without = Slo(name="interactive", priority=0)
    assert Door().decide(INTERACTIVE, hopeless) == Admit(without)
    door = Door()
    door.dispatch("s", STANDARD)
    busy = Predicted(9.0, hopeless.tpot_s, hopeless.idle_ttft_s, hopeless.idle_tpot_s)
    assert door.decide(INTERACTIVE, busy) == Wait()


def test_no_number_of_nodes_is_asked_for_what_even_idle_ones_could_not_keep() -> None:
    door = Door(refuses=False)
    door.dispatch("a", replace(INTERACTIVE, tpot_s=IDLE.idle_tpot_s / 2))
    assert door.admission.tightest(door.clock.now()) is None
    door.dispatch("b", STANDARD)
    assert door.admission.tightest(door.clock.now()) == (STANDARD.ttft_s, STANDARD.tpot_s)
    for request_id in "ab":
        door.admission.ended(request_id, door.clock.now(), 5)
    door.clock.advance(2 * PRESENCE_S)
    assert door.admission.tightest(door.clock.now()) is None


def test_an_overdue_promise_is_hopeless() -> None:
    overdue = Slo(name="interactive", priority=2, ttft_s=-0.1, tpot_s=0.1)
    door = Door()
    assert door.decide(overdue) == Admit(Slo(name="interactive", priority=0))
    assert door.admission.tightest(door.clock.now()) is None


def test_refusals_are_counted_by_reason() -> None:
    door = Door(max_waiting=1)
    door.decide(INTERACTIVE, queued(9.0))
    door.decide(INTERACTIVE, Predicted(tpot_s=0.2))
    door.wait_in_line("b")
    door.decide(BATCH)
    assert door.admission.num_refused == {"ttft": 1, "tpot": 1, "inflight": 0, "waiting": 1}


@pytest.mark.parametrize("refuses", [True, False])
def test_too_many_in_flight_are_refused_whatever_is_predicted(refuses: bool) -> None:
    door = Door(max_inflight=1, refuses=refuses)
    door.dispatch("one", INTERACTIVE)
    decision = door.decide(INTERACTIVE)
    assert isinstance(decision, Refuse)
    assert decision.reason == "inflight"
    assert "1 requests are in flight" in decision.error.message
    assert isinstance(door.decide(BATCH), Wait if refuses else Refuse)
    assert isinstance(door.admission.reconsider(BATCH, IDLE, door.clock.now()), Wait)
    door.admission.ended("one", door.clock.now())
    assert isinstance(door.decide(INTERACTIVE), Admit)


def test_a_tenant_cannot_take_all_places_on_the_nodes() -> None:
    door = Door(max_inflight=20)
    alice, bob = (replace(INTERACTIVE, tenant=name) for name in ("alice", "bob"))
    while isinstance(door.decide(alice), Admit):
        door.dispatch(f"alice-{len(door.admission._in_flight)}", alice)
    assert len(door.admission._in_flight) == 18
    assert isinstance(door.decide(bob), Admit)
    assert isinstance(door.decide(bob, num_answers=2), Admit)
    assert isinstance(door.decide(replace(BATCH, tenant="alice")), Wait)
    door.admission.ended("alice-0", door.clock.now())
    assert isinstance(door.decide(alice), Admit)


def test_a_call_as_large_as_all_places_has_its_turn() -> None:
    door = Door(max_inflight=8)
    alice = replace(INTERACTIVE, tenant="alice")
    assert isinstance(door.decide(alice, num_answers=8), Admit)
    door.dispatch("other", replace(INTERACTIVE, tenant="bob"))
    assert isinstance(door.decide(alice, num_answers=8), Refuse)


# ---- several classes ---------------------------------------------------------------------------


def test_the_last_room_is_for_the_highest_priority() -> None:
    door = Door()
    room_s = STANDARD.ttft_s - IDLE.idle_ttft_s
    crowded = queued(room_s * 0.95)
    assert isinstance(door.decide(STANDARD, crowded), Admit)
    door.dispatch("i", INTERACTIVE)
    assert isinstance(door.decide(STANDARD, crowded), Refuse)
    door.admission.ended("i", door.clock.now())
    door.clock.advance(PRESENCE_S + 1)
    assert isinstance(door.decide(STANDARD, queued(room_s * 0.85)), Admit)
    assert isinstance(door.decide(STANDARD, crowded), Admit)


def test_the_last_room_is_for_the_class_that_has_less_of_its_share() -> None:
    door = Door()
    flood, other = (Slo(name=name, priority=1, ttft_s=2.0) for name in ("flood", "other"))
    crowded = queued((2.0 - IDLE.idle_ttft_s) * 0.95)
    assert isinstance(door.decide(other, IDLE), Admit)
    for i in range(10):
        door.dispatch(str(i), flood)
    assert isinstance(door.decide(flood, crowded), Refuse)
    assert isinstance(door.decide(other, crowded), Admit)


def test_a_weight_is_a_larger_share() -> None:
    door = Door()
    heavy = Slo(name="heavy", priority=1, ttft_s=2.0, weight=4.0)
    light = Slo(name="light", priority=1, ttft_s=2.0)
    for i in range(3):
        door.dispatch(f"h{i}", heavy)
    door.dispatch("l", light)
    crowded = queued((2.0 - IDLE.idle_ttft_s) * 0.95)
    assert isinstance(door.decide(heavy, crowded), Admit)
    assert isinstance(door.decide(light, crowded), Refuse)


def test_a_looser_tpot_does_not_slow_the_batches_of_those_who_go_before() -> None:
    door = Door()
    slow = Predicted(tpot_s=0.15)
    assert isinstance(door.decide(STANDARD, slow), Admit)
    door.decide(INTERACTIVE, IDLE)
    assert "must be within 0.1 s" in refused(door.decide(STANDARD, slow)).message
    long = Predicted(tpot_s=0.15, idle_tpot_s=0.12)  # in no batch would it be faster than that
    assert isinstance(door.decide(STANDARD, long), Admit)


# ---- requests without a promise ----------------------------------------------------------------


def test_alone_they_run_at_full_speed_behind_a_short_queue() -> None:
    door = Door()
    assert isinstance(door.decide(BATCH, Predicted(tpot_s=5.0)), Admit)
    assert isinstance(door.decide(BATCH, queued(BACKLOG_S)), Admit)
    assert isinstance(door.decide(BATCH, queued(BACKLOG_S + 0.1)), Wait)


@pytest.mark.parametrize("crowded", [queued(1.01), Predicted(tpot_s=0.061)])
def test_they_wait_while_they_would_take_the_room_of_promises(crowded: Predicted) -> None:
    door = Door()
    assert isinstance(door.decide(BATCH, crowded), Admit)
    door.dispatch("i", INTERACTIVE)
    assert isinstance(door.decide(BATCH, crowded), Wait)
    assert isinstance(door.decide(BATCH, IDLE), Admit)


def test_their_own_long_prompt_is_no_reason_to_wait() -> None:
    door = Door()
    door.dispatch("i", INTERACTIVE)
    assert isinstance(door.decide(BATCH, Predicted(ttft_s=30.5, idle_ttft_s=30.0)), Admit)


def test_the_tightest_promise_around_counts() -> None:
    door = Door()
    door.dispatch("s", STANDARD)
    crowded = queued(3.0)
    assert isinstance(door.decide(BATCH, crowded), Admit)
    door.decide(INTERACTIVE)
    assert door.admission.tightest(door.clock.now()) == (2.0, 0.1)
    assert isinstance(door.decide(BATCH, crowded), Wait)


def test_one_request_that_came_late_does_not_stand_for_its_class() -> None:
    door = Door()
    door.decide(Slo(name="interactive", priority=2, ttft_s=0.6, tpot_s=0.1))
    door.decide(INTERACTIVE)
    door.decide(Slo(name="interactive", priority=2, ttft_s=0.7, tpot_s=0.1))
    assert door.admission.tightest(door.clock.now()) == (2.0, 0.1)


def test_a_class_is_around_while_it_runs_and_a_little_longer() -> None:
    door = Door()
    door.dispatch("i", INTERACTIVE)
    door.clock.advance(60.0)
    assert door.admission.tightest(door.clock.now()) is not None
    door.admission.ended("i", door.clock.now())
    door.clock.advance(PRESENCE_S)
    assert door.admission.tightest(door.clock.now()) is not None
    door.clock.advance(0.1)
    assert door.admission.tightest(door.clock.now()) is None


def test_nobody_overtakes_the_line_but_promises_do() -> None:
    door = Door()
    door.wait_in_line("b1")
    assert isinstance(door.decide(BATCH), Wait)
    assert isinstance(door.decide(INTERACTIVE), Admit)


def test_the_head_of_the_line_goes_when_there_is_room() -> None:
    door = Door()
    door.dispatch("i", INTERACTIVE)
    now_s = door.clock.now()
    assert door.admission.reconsider(BATCH, queued(1.5), now_s) == Wait()
    assert door.admission.reconsider(BATCH, IDLE, now_s) == Admit(BATCH)


def test_a_full_line_refuses_with_the_pace_at_which_it_moves() -> None:
    door = Door(max_waiting=2)
    door.wait_in_line("b1")
    door.clock.advance(8.0)
    door.wait_in_line("b2")
    decision = door.decide(BATCH)
    assert isinstance(decision, Refuse)
    assert decision.reason == "waiting"
    assert decision.error.retry_after_s == 4.0  # the head has waited for 8 s; two do
    door.line.leave("b2")
    assert isinstance(door.decide(BATCH), Wait)


# ---- what is learned ---------------------------------------------------------------------------


def test_predictions_that_were_too_good_make_it_more_careful() -> None:
    door = Door()
    predicted = queued(1.4)
    assert isinstance(door.decide(INTERACTIVE, predicted), Admit)
    for i in range(10):
        door.dispatch(str(i), INTERACTIVE, predicted)
        door.clock.advance(2.5)
        door.admission.first_token(str(i), door.clock.now())
    assert isinstance(door.decide(INTERACTIVE, predicted), Refuse)
    assert isinstance(door.decide(STANDARD, queued(8.0)), Admit)  # a class of its own


def test_a_tpot_is_learned_from_whole_answers_only() -> None:
    door = Door()
    predicted = Predicted(tpot_s=0.09)
    for i in range(10):
        door.dispatch(str(i), INTERACTIVE, predicted)
        door.admission.first_token(str(i), door.clock.now())
        door.clock.advance(0.12 * 10)
        door.admission.ended(str(i), door.clock.now(), num_tokens=0)
    assert isinstance(door.decide(INTERACTIVE, predicted), Admit)
    for i in range(10):
        door.dispatch(str(i), INTERACTIVE, predicted)
        door.admission.first_token(str(i), door.clock.now())
        door.clock.advance(0.12 * 10)
        door.admission.ended(str(i), door.clock.now(), num_tokens=11)
    assert isinstance(door.decide(INTERACTIVE, predicted), Refuse)


def test_nothing_is_learned_where_nothing_was_in_the_way() -> None:
    door = Door()
    for i in range(50):
        door.dispatch(str(i), INTERACTIVE, IDLE)
        door.clock.advance(30.0)  # a node hung
        door.admission.first_token(str(i), door.clock.now())
        door.admission.ended(str(i), door.clock.now())
    assert isinstance(door.decide(INTERACTIVE, queued(1.4)), Admit)


def test_a_margin_comes_to_rest_where_most_keep_within_it() -> None:
    margin = Margin()
    for round_ in range(200):
        for ratio in range(1, 11):  # real / predicted: 0.15, 0.3, ... 1.5
            margin.learn(1.0, 0.15 * (ratio * 7 % 11))
            assert LOWEST <= margin.factor <= HIGHEST, round_
    assert 1.2 < margin.factor < 1.5


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), max_size=200))
def test_a_margin_stays_within_its_bounds(pairs: list[tuple[float, float]]) -> None:
    margin = Margin()
    for predicted_s, real_s in pairs:
        margin.learn(predicted_s, real_s)
        assert LOWEST <= margin.factor <= HIGHEST


# ---- models that wake --------------------------------------------------------------------------


def waking(*, queue_s: float = 0.0, wake_s: float = 1.0, is_ordered: bool = True) -> Awaited:
    return Awaited(wake_s=wake_s, is_ordered=is_ordered, queue_s=queue_s, prompt_s=0.5)


@pytest.mark.parametrize(
    ("awaited", "keeps_promise"),
    [
        (waking(queue_s=0.4), True),
        (waking(is_ordered=False), True),
        (waking(wake_s=1.6, is_ordered=False), False),  # somebody has to wait, or none wakes
        (waking(queue_s=0.6, is_ordered=False), False),
        (None, False),  # nobody knows
    ],
)
def test_a_promise_counts_the_wake(awaited: Awaited | None, *, keeps_promise: bool) -> None:
    door = Door()
    decision = door.admission.decide_without_nodes(INTERACTIVE, awaited, 1000.0)
    assert isinstance(decision, Wait)
    assert decision.keeps_promise is keeps_promise
    waits_as = door.admission.wait("r", INTERACTIVE, INTERACTIVE, 1000.0, decision)
    assert (waits_as == INTERACTIVE) is keeps_promise
    assert (waits_as.ttft_s == 0.0) is not keeps_promise


@pytest.mark.parametrize("awaited", [waking(queue_s=0.6), waking(wake_s=1.6, queue_s=0.2)])
def test_who_would_miss_its_promise_comes_again_after_the_wake_and_the_queue(
    awaited: Awaited,
) -> None:
    door = Door()
    error = refused(door.admission.decide_without_nodes(INTERACTIVE, awaited, 1000.0))
    assert error.retry_after_s == awaited.wake_s + awaited.queue_s
    assert f"the model is awake in {awaited.wake_s:.3g} s" in error.message
    assert door.admission.num_refused["ttft"] == 1
    for slo in (BATCH, replace(INTERACTIVE, ttft_s=0.4)):  # not even nodes that are awake keep it
        assert door.admission.decide_without_nodes(slo, awaited, 1000.0) == Wait()
    assert Door(refuses=False).admission.decide_without_nodes(INTERACTIVE, awaited, 0.0) == Wait()


def test_nobody_leaves_a_full_line_before_the_wake() -> None:
    door = Door(max_waiting=1)
    door.wait_in_line("r")
    door.clock.advance(0.5)
    decision = door.admission.decide_without_nodes(BATCH, waking(), door.clock.now())
    assert isinstance(decision, Refuse)
    assert (decision.reason, decision.error.retry_after_s) == ("waiting", 1.5)
