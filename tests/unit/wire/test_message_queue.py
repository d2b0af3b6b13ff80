"""Legs wait in turns of their payers; what is cancelled is not sent."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from pdserve.protocol import (
    CancelLeg,
    DecodeLeg,
    DrainSeen,
    PrefillLeg,
    Prompt,
    SamplingParams,
    Sibling,
    Slo,
)
from pdserve.wire.outbox import MessageQueue


def leg(request_id: str, tenant: str, siblings: tuple[str, ...] = ()) -> PrefillLeg:
    return PrefillLeg(
        request_id=request_id,
        prompt=Prompt([1]),
        sampling=SamplingParams(),
        slo=Slo(tenant=tenant),
        siblings=[Sibling(request_id=sibling, seed=0) for sibling in siblings],
    )


def cancel(request_id: str) -> CancelLeg:
    return CancelLeg(request_id=request_id, reason="")


def rest(queue: MessageQueue) -> Iterator[msgspec.Struct]:
    while queue:
        yield queue.take()


def queue_of(*messages: msgspec.Struct) -> MessageQueue:
    queue = MessageQueue()
    for message in messages:
        queue.add(message)
    return queue


def test_a_flood_of_one_payer_is_one_leg_ahead_of_another() -> None:
    flood = [leg(f"a{n}", "a") for n in range(100)]
    late = DecodeLeg("b0", Prompt([1]), SamplingParams(), slo=Slo(tenant="b"))
    assert list(rest(queue_of(*flood, late)))[:3] == [flood[0], late, flood[1]]


def test_a_leg_that_is_cancelled_before_its_turn_is_never_sent() -> None:
    queue = queue_of(leg("r", "a"), cancel("r"))
    assert not queue


def test_a_leg_that_was_sent_is_cancelled_before_other_legs_go() -> None:
    queue = queue_of(leg("r0", "a"), leg("r1", "a"))
    queue.take()
    queue.add(cancel("r0"))
    assert list(rest(queue)) == [cancel("r0"), leg("r1", "a")]


def test_a_sibling_is_cancelled_after_the_leg_that_names_it() -> None:
    shared = leg("r0", "a", ("r1",))
    assert list(rest(queue_of(shared, cancel("r1")))) == [shared, cancel("r1")]
    assert list(rest(queue_of(shared, cancel("r0"), cancel("r1")))) == [cancel("r1")]


def test_any_other_message_comes_after_all_before_it() -> None:
    first, second = leg("r0", "a"), leg("r1", "b")
    assert list(rest(queue_of(first, second, DrainSeen()))) == [first, second, DrainSeen()]


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abc"), st.booleans()), max_size=40))
def test_what_is_sent_is_what_was_added_and_not_cancelled(
    acts: list[tuple[int, str, bool]],
) -> None:
    queue, expected, seen = MessageQueue(), dict[str, str](), list[msgspec.Struct]()
    for number, tenant, is_cancel in acts:
        request_id = f"r{number}"
        if is_cancel:
            expected.pop(request_id, None)
            queue.add(cancel(request_id))
        elif request_id not in expected:
            expected[request_id] = tenant
            queue.add(leg(request_id, tenant))
        if len(acts) % 3 == 0 and queue:
            message = queue.take()
            seen.append(message)
            if isinstance(message, PrefillLeg):
                del expected[message.request_id]
    left = [message for message in rest(queue) if isinstance(message, PrefillLeg)]
    assert {message.request_id: message.slo.tenant for message in left} == expected
    assert not queue._payers
