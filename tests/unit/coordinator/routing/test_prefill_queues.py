"""What goes before a prompt, and how it becomes less."""

from __future__ import annotations

import random

import pytest

from coordinator.nodes.registry import Registry
from coordinator.routing.loads.prefill import PendingPrompt, PromptQueue, ServiceClass
from pdserve.protocol import NodeRole, Slo
from tests.fakes.hellos import node_hello
from tests.fakes.outbox import RecordingOutbox
from tests.unit.coordinator.routing.nodes import Nodes

MS = 0.001


def queue_s(nodes: Nodes, priority: int = 0) -> float:
    return nodes.place(100, priority=priority).queue_s


def test_prompts_wait_for_those_before_them() -> None:
    nodes = Nodes(p=1, d=1)
    nodes.send(100)
    nodes.send(50)
    assert queue_s(nodes) == pytest.approx(150 * MS)


def test_only_prompts_of_the_same_or_a_higher_priority_go_before() -> None:
    nodes = Nodes(p=1, d=1)
    for priority, tokens in ((0, 100), (2, 30), (1, 10)):
        nodes.send(tokens, priority=priority)
    assert queue_s(nodes, priority=2) == pytest.approx(30 * MS)
    assert queue_s(nodes, priority=1) == pytest.approx(40 * MS)
    assert queue_s(nodes, priority=0) == pytest.approx(140 * MS)
    assert queue_s(nodes, priority=3) == pytest.approx(0)


A, B = Slo(name="a"), Slo(name="b")


def test_a_flood_of_an_equal_class_goes_before_in_its_share_only() -> None:
    nodes = Nodes(p=1, d=1)
    for _ in range(10):
        nodes.send(100, slo=A)
    assert nodes.place(100, slo=A).queue_s == pytest.approx(1000 * MS)
    assert nodes.place(100, slo=B).queue_s == pytest.approx(100 * MS)  # as much as it takes itself
    nodes.send(50, slo=B)
    assert nodes.place(100, slo=B).queue_s == pytest.approx((50 + 150) * MS)
    assert nodes.place(100, slo=A).queue_s == pytest.approx(1050 * MS)


def test_shares_go_by_weight() -> None:
    nodes = Nodes(p=1, d=1)
    for _ in range(10):
        nodes.send(100, slo=A)
    heavy, light = Slo(name="b", weight=4.0), Slo(name="b", weight=0.5)
    assert nodes.place(100, slo=heavy).queue_s == pytest.approx(25 * MS)
    assert nodes.place(100, slo=light).queue_s == pytest.approx(200 * MS)


def test_what_is_being_computed_gets_less_but_nothing_else_does() -> None:
    nodes = Nodes(p=1, d=1)
    nodes.send(100)
    nodes.send(50)
    nodes.clock.advance(60 * MS)
    assert queue_s(nodes) == pytest.approx(90 * MS)
    nodes.clock.advance(1.0)  # it takes longer than predicted: the second one is still to come
    assert queue_s(nodes) == pytest.approx(50 * MS)


def test_with_token_one_the_next_one_begins() -> None:
    nodes = Nodes(p=1, d=1)
    first = nodes.send(100)
    nodes.send(50)
    nodes.clock.advance(60 * MS)
    first.progressed(1)
    assert queue_s(nodes) == pytest.approx(50 * MS)
    nodes.clock.advance(20 * MS)
    assert queue_s(nodes) == pytest.approx(30 * MS)


def test_what_has_been_computed_stays_so_when_another_prompt_leaves() -> None:
    nodes = Nodes(p=1, d=1)
    nodes.send(100)
    second = nodes.send(50)
    nodes.clock.advance(60 * MS)
    second.end(by_itself=False)
    assert queue_s(nodes) == pytest.approx(40 * MS)


def test_a_cancelled_prompt_leaves_the_queue() -> None:
    nodes = Nodes(p=1, d=1)
    nodes.send(100).end(by_itself=False)
    assert queue_s(nodes) == 0


def test_what_a_node_has_from_others_counts_and_ours_does_not_count_twice() -> None:
    nodes = Nodes(p=1, d=1)
    (prefill,) = nodes.prefill
    nodes.send(100)
    nodes.report(prefill, queued_tokens=100)
    assert queue_s(nodes) == pytest.approx(100 * MS)
    nodes.report(prefill, queued_tokens=300)
    assert queue_s(nodes) == pytest.approx(300 * MS)
    nodes.report(prefill, queued_tokens=0)
    assert queue_s(nodes) == pytest.approx(100 * MS)


def test_what_is_cached_of_our_prompts_is_not_taken_for_others() -> None:
    """A node counts a prompt that waits as a whole."""
    nodes = Nodes(p=1, d=1)
    prompt = list(range(500, 700))
    nodes.holds(nodes.prefill[0], prompt[:160])
    nodes.send(prompt)
    nodes.report(nodes.prefill[0], queued_tokens=200)
    assert queue_s(nodes) == pytest.approx(40 * MS)


def test_a_node_that_is_lost_takes_its_queue_with_it() -> None:
    nodes = Nodes(p=1, d=1)
    booking = nodes.send(100)
    nodes.registry.remove(nodes.prefill[0])
    again = nodes.join("again", nodes.prefill[0].role)
    assert again.slot == nodes.prefill[0].slot
    assert queue_s(nodes) == 0
    booking.end(by_itself=False)  # late news
    assert queue_s(nodes) == 0
    assert nodes.place().prefill is again


PROMISED = Slo(name="a", ttft_s=1.0)


def overloaded(*, late_last: bool) -> Nodes:
    """A prompt is being computed, and of two that wait the longer one has become late."""
    nodes = Nodes(d=1)
    nodes.prefill.append(nodes.join("p0", NodeRole.PREFILL, late_last=late_last))
    for num_tokens in (400, 500, 50):  # the second must begin within 1 - 1.5 x 0.5 s
        nodes.send(num_tokens, slo=PROMISED)
    nodes.clock.advance(0.3)
    return nodes


@pytest.mark.parametrize(("late_last", "queue_s"), [(True, 0.15), (False, 0.65)])
def test_a_prompt_that_is_late_delays_no_other_one_where_it_is_computed_last(
    late_last: bool, queue_s: float
) -> None:
    nodes = overloaded(late_last=late_last)
    assert nodes.place(100, slo=PROMISED).queue_s == pytest.approx(queue_s)


def test_it_delays_those_of_lower_priorities_and_its_share_of_others() -> None:
    nodes = overloaded(late_last=True)
    assert nodes.place(100, slo=Slo(name="b")).queue_s == pytest.approx(0.1)
    assert nodes.place(100, slo=Slo(name="b", priority=-1)).queue_s == pytest.approx(0.65)


def test_a_prompt_that_is_late_is_computed_when_nothing_else_is_there() -> None:
    nodes = Nodes(d=1)
    nodes.prefill.append(nodes.join("p0", NodeRole.PREFILL, late_last=True))
    first, _late = (nodes.send(num_tokens, slo=PROMISED) for num_tokens in (400, 500))
    nodes.clock.advance(0.3)
    assert nodes.place(100, slo=PROMISED).queue_s == pytest.approx(0.1), "the second one is late"
    nodes.clock.advance(0.3)
    first.progressed(1)  # the second one begins now, and cannot be done within 1 s
    nodes.clock.advance(0.2)
    lower = Slo(name="b", priority=-1)
    assert nodes.place(100, slo=lower).queue_s == pytest.approx(0.3), "it has had 0.2 of 0.5 s"
    nodes.send(30, slo=PROMISED)  # goes ahead of it
    nodes.clock.advance(0.01)
    assert nodes.place(100, slo=PROMISED).queue_s == pytest.approx(0.02)


def test_a_prompt_that_has_begun_is_late_when_there_is_no_time_for_the_rest() -> None:
    """Not when there would be none for all of it: a higher priority has interrupted it."""
    nodes = Nodes(d=1)
    nodes.prefill.append(nodes.join("p0", NodeRole.PREFILL, late_last=True))
    nodes.send(500, slo=PROMISED)
    nodes.clock.advance(0.2)
    nodes.send(400, priority=1)
    nodes.clock.advance(0.3)
    assert nodes.place(100, slo=PROMISED).queue_s == pytest.approx(0.1 + 0.3)
    nodes.clock.advance(0.21)
    assert nodes.place(100, slo=PROMISED).queue_s == 0.0


def test_a_late_prompt_that_begins_soon_enough_is_not_late_any_more() -> None:
    nodes = Nodes(d=1)
    nodes.prefill.append(nodes.join("p0", NodeRole.PREFILL, late_last=True))
    first, _ = (nodes.send(num_tokens, slo=PROMISED) for num_tokens in (400, 500))
    nodes.clock.advance(0.4)
    assert nodes.place(100, slo=PROMISED).queue_s == 0.0, "it should have begun at 0.25 s"
    first.progressed(1)
    nodes.send(30, slo=PROMISED)  # does not go ahead of it
    nodes.clock.advance(0.1)
    assert nodes.place(100, slo=PROMISED).queue_s == pytest.approx(0.4 + 0.03)


def test_a_prompt_that_is_late_itself_waits_for_older_ones() -> None:
    nodes = overloaded(late_last=True)
    in_time, late = Slo(name="a", ttft_s=1.0), Slo(name="a", ttft_s=0.2)
    assert nodes.place(100, slo=in_time).queue_s == pytest.approx(0.15)
    assert nodes.place(100, slo=late).queue_s == pytest.approx(0.65)
    assert nodes.place(100, slo=Slo(name="a")).queue_s == pytest.approx(0.65)


def test_what_nodes_were_told_of_a_promise_says_whether_a_prompt_is_late() -> None:
    """One that could not keep its promise is sent without it, and its node calls it never late."""
    nodes = Nodes(d=1)
    nodes.prefill.append(nodes.join("p0", NodeRole.PREFILL, late_last=True))
    hopeless = Slo(name="a", ttft_s=0.1)
    for _ in range(3):
        request = nodes.request(400, slo=hopeless)
        nodes.router.dispatched(request, nodes.router.place(request), Slo(name="a"))
    nodes.clock.advance(0.2)
    assert nodes.place(100, slo=PROMISED).queue_s == pytest.approx(1.0)


def test_the_next_head_is_the_oldest_of_the_highest_priority_and_in_time() -> None:
    rng = random.Random(0)
    hello = node_hello("p", NodeRole.PREFILL)
    queue = PromptQueue(Registry().add(hello, RecordingOutbox()))  # type: ignore[arg-type]
    for number in range(2000):
        waiting = list(queue.prompts)
        if not waiting or rng.random() < 0.45:
            of = ServiceClass(rng.randrange(3), "class", 1.0)
            queue.add(f"r{number}", PendingPrompt(of, 1.0, 1))
        elif rng.random() < 0.5:
            queue.set_late(rng.choice(waiting), rng.random() < 0.5)
        else:
            gone = rng.choice([waiting[0], rng.choice(waiting)])
            queue.set_late(gone, False)
            queue.remove(gone)

        def rank(one: str) -> tuple[int, bool]:
            return queue.prompts[one].service_class.priority, one not in queue.late

        assert queue.next_head() == max(queue.prompts, key=rank, default=None)
