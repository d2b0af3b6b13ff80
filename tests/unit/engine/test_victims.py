"""Who gives way when a stream cannot grow."""

from __future__ import annotations

from pdserve.engine.kv.shortage import Victims
from pdserve.engine.request import Request, next_due_s
from pdserve.lifecycle import Targets
from tests.requests import make_request


def stream(
    *,
    priority: int = 0,
    tpot_s: float = 0.1,
    num_outputs: int = 1,
    received_s: float = 0.0,
    num_preemptions: int = 0,
) -> Request:
    request = make_request(
        4,
        output_token_ids=[1] * num_outputs,
        targets=Targets(priority=priority, tpot_s=tpot_s),
        num_preemptions=num_preemptions,
    )
    request.lifecycle.received_s = received_s
    request.lifecycle.first_token_s = 10.0
    return request


def test_tokens_are_due_at_promised_gaps_behind_token_one() -> None:
    assert next_due_s(stream(tpot_s=0.5, num_outputs=4)) == 12.0
    handed_off = stream(tpot_s=0.5)
    handed_off.lifecycle.first_token_s = None
    handed_off.lifecycle.prefill_end_s = 20.0
    assert next_due_s(handed_off) == 20.5
    assert next_due_s(stream(tpot_s=float("inf"), num_outputs=2), default_tpot_s=1.0) == 12.0


def test_the_lowest_priority_gives_way_first() -> None:
    low, high = stream(tpot_s=0.01), stream(priority=1, tpot_s=5.0)
    assert Victims().choose([low, high], high) is low


def test_then_whoever_has_the_most_slack() -> None:
    tight, ahead = stream(num_outputs=2), stream(num_outputs=9)
    assert Victims().choose([tight, ahead], tight) is ahead
    assert Victims().choose([tight, ahead], ahead) is ahead, "the needy one itself"


def test_without_promises_the_youngest() -> None:
    old, young = (stream(tpot_s=float("inf"), received_s=s) for s in (1.0, 2.0))
    assert Victims().choose([old, young], old) is young


def test_nobody_gives_way_to_a_lower_priority() -> None:
    low, high = stream(), stream(priority=1, num_outputs=50)
    assert Victims().choose([low, high], low) is low


def test_whoever_has_given_way_often_enough_is_spared_while_there_are_others() -> None:
    spared, other = stream(num_outputs=50, num_preemptions=3), stream(num_preemptions=2)
    assert Victims(max_preemptions=3).choose([spared, other], other) is other
    assert Victims(max_preemptions=4).choose([spared, other], other) is spared


def test_when_all_have_the_youngest_gives_way() -> None:
    old = stream(num_outputs=50, num_preemptions=3, received_s=1.0)
    young = stream(num_preemptions=3, received_s=2.0)
    assert Victims().choose([old, young], old) is young


def test_prefill_legs_do_not_give_way() -> None:
    leg = make_request(8, leg_token_limit=1)
    needy = stream()
    assert Victims().choose([leg, needy], needy) is needy
    assert Victims().in_order([leg, needy]) == [needy]


def test_for_a_place_those_come_last_that_have_given_way_often_enough() -> None:
    spared, other = stream(num_outputs=50, num_preemptions=3), stream(num_preemptions=2)
    high = stream(priority=1)
    assert Victims(max_preemptions=3).in_order([high, spared, other]) == [other, spared, high]
