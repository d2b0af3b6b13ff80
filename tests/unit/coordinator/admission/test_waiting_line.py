"""Priorities, then payers who share, then first come first served; up to so many."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.admission import WaitingLine
from coordinator.admission.waiting_line import FEW
from pdserve.protocol import Slo

ALICE = Slo(name="batch", tenant="alice")
BOB = Slo(name="batch", tenant="bob")


def line_of(*names: str, max_waiting: int = 3) -> WaitingLine[str]:
    line = WaitingLine[str](max_waiting)
    for number, name in enumerate(names):
        line.join(name, name.upper(), ALICE, float(number))
    return line


def serve(line: WaitingLine[str], payer: Slo, num_tokens: float) -> str:
    """Let the head go, whose payer is charged."""
    head = line.head
    assert head is not None
    line.leave(head.lower())
    line.charge(payer, num_tokens)
    return head


def test_the_first_to_come_is_the_head() -> None:
    line = line_of("a", "b", "c")
    assert [serve(line, ALICE, 1.0) for _ in range(3)] == ["A", "B", "C"]
    assert line.head is None
    assert len(line) == 0


def test_the_oldest_of_each_payer_are_in_the_order_of_their_turns() -> None:
    line = line_of("a", "b", max_waiting=9)
    line.join("c", "C", BOB, 2.0)
    line.join("d", "D", Slo(name="batch", tenant="alice", priority=1), 3.0)
    assert list(line.heads()) == ["D", "A", "C"]
    line.charge(ALICE, 1.0)
    assert list(line.heads()) == ["D", "C", "A"]


def test_anybody_may_leave_once_or_twice() -> None:
    line = line_of("a", "b", "c")
    line.leave("b")
    line.leave("b")
    line.leave("a")
    assert line.head == "C"
    assert "b" not in line
    assert "c" in line


def test_a_full_line_takes_nobody() -> None:
    line = line_of("a", "b", max_waiting=2)
    assert line.is_full(ALICE)
    assert line.is_full(BOB)
    with pytest.raises(ValueError, match="c cannot join a line of 2"):
        line.join("c", "C", ALICE, 0.0)
    line.leave("a")
    line.join("c", "C", ALICE, 0.0)
    assert line.head == "B"


def test_nobody_is_in_it_twice() -> None:
    line = line_of("a")
    with pytest.raises(ValueError, match="a cannot join"):
        line.join("a", "A", ALICE, 1.0)


def test_a_flood_leaves_places_to_others() -> None:
    line = WaitingLine[str](1000)
    for payer in (ALICE, BOB):
        while not line.is_full(payer):
            line.join(f"{payer.tenant}-{len(line)}", "", payer, 0.0)
    assert (line.num_waiting(ALICE), line.num_waiting(BOB)) == (900, 90)
    line.join("c", "C", Slo(name="batch", tenant="carol"), 0.0)


def test_the_pace_is_a_payers_own() -> None:
    assert line_of().advance_s(ALICE, 9.0) == 0.0
    line = line_of("a", "b", "c", max_waiting=9)
    line.join("d", "D", BOB, 6.0)
    assert line.advance_s(ALICE, 9.0) == 3.0
    assert line.advance_s(BOB, 9.0) == 3.0
    assert line.advance_s(Slo(name="else"), 10.0) == 2.5


def test_a_higher_priority_goes_first_whatever_it_was_given() -> None:
    line = line_of("a")
    important = Slo(name="urgent", priority=1)
    line.charge(important, 1e9)
    line.join("b", "B", important, 1.0)
    assert [serve(line, important, 1.0), serve(line, ALICE, 1.0)] == ["B", "A"]


def test_who_was_given_less_goes_first_and_absence_is_no_credit() -> None:
    line = WaitingLine[str](100)
    for _ in range(50):
        line.charge(ALICE, 1000.0)  # admitted at once: nobody waited
    for number in range(8):
        line.join(f"a{number}", f"A{number}", ALICE, 0.0)
    served = [serve(line, ALICE, 100.0) for _ in range(2)]
    for number in range(8):
        line.join(f"b{number}", f"B{number}", BOB, 1.0)
    while len(line) > 8:
        head = line.head
        assert head is not None
        served.append(serve(line, ALICE if head.startswith("A") else BOB, 100.0))
    assert Counter(head[0] for head in served[2:]) == {"A": 3, "B": 3}, "they take turns"


def test_what_was_charged_too_much_is_given_back() -> None:
    line = WaitingLine[str](9)
    line.join("b1", "B1", BOB, 0.0)
    line.join("a1", "A1", ALICE, 0.0)
    line.charge(BOB, 1000.0)
    assert line.head == "A1"
    line.charge(ALICE, 500.0)
    assert line.head == "A1"
    line.charge(BOB, -900.0)
    line.charge(ALICE, 1.0)
    assert line.head == "B1", "and not 500 tokens later"


WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 1.0}
PAYERS = {name: Slo(name=name, weight=weight) for name, weight in WEIGHTS.items()}
MOST_TOKENS = 50

moves = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.sampled_from(list(PAYERS)), st.just(0)),
        st.tuples(st.just("serve"), st.just(""), st.integers(1, MOST_TOKENS)),
        st.tuples(st.just("go"), st.sampled_from(list(PAYERS)), st.just(0)),
        st.tuples(st.just("admit"), st.sampled_from(list(PAYERS)), st.integers(1, MOST_TOKENS)),
    ),
    max_size=120,
)


class _Watch:
    """What each pair of payers was given since both of them have waited without a break."""

    def __init__(self) -> None:
        self.given: dict[tuple[str, str], Fraction] = {}  # over the weight, of the first less other

    def waiting(self, names: set[str]) -> None:
        pairs = {(a, b) for a in names for b in names if a != b}
        self.given = {pair: self.given.get(pair, Fraction(0)) for pair in pairs}

    def charged(self, name: str, num_tokens: int) -> None:
        amount = Fraction(num_tokens) / Fraction(WEIGHTS[name])
        for first, second in self.given:
            if name == first:
                self.given[first, second] += amount
            elif name == second:
                self.given[first, second] -= amount

    def check(self) -> None:
        for (first, second), difference in self.given.items():
            bound = MOST_TOKENS / WEIGHTS[first] + MOST_TOKENS / WEIGHTS[second]
            assert difference <= bound + 1e-6


@given(moves)
def test_the_line_has_a_head_keeps_order_and_shares_fairly(
    moves: list[tuple[str, str, int]],
) -> None:
    """There is a head whenever anybody waits; a payer's own keep their order; and payers who wait
    all the time are given as much over their weights, but for one request of each (SFQ's bound)."""
    line = WaitingLine[str](10**9)
    queues: dict[str, list[str]] = {name: [] for name in PAYERS}
    watch = _Watch()
    for number, (move, name, num_tokens) in enumerate(moves):
        if move == "join":
            queues[name].append(f"{name}{number}")
            line.join(f"{name}{number}", f"{name}{number}", PAYERS[name], 0.0)
        elif move == "go" and queues[name]:
            line.leave(queues[name].pop())
        elif move == "admit" and not len(line):
            line.charge(PAYERS[name], num_tokens)
        elif move == "serve" and len(line):
            head = line.head
            assert head is not None
            assert queues[head[0]][0] == head
            queues[head[0]].pop(0)
            line.leave(head)
            line.charge(PAYERS[head[0]], num_tokens)
            watch.charged(head[0], num_tokens)
        assert len(line) == sum(map(len, queues.values()))
        assert (line.head is None) == (len(line) == 0)
        watch.waiting({name for name, queue in queues.items() if queue})
        watch.check()


def test_what_is_kept_is_bounded() -> None:
    """Payers who come once, and corrections of those who stay."""
    line = WaitingLine[str](9)
    line.join("a", "A", ALICE, 0.0)
    for number in range(5000):
        line.charge(Slo(name="batch", tenant=f"t{number}"), 1.0)
        line.charge(ALICE, 5.0)
        line.charge(ALICE, -4.0)
    turns = line._turns[0]
    assert len(turns._heap) < 200
    assert len(turns._shares._scales[0].tags) < 200


def test_priorities_that_nobody_waits_in_are_forgotten() -> None:
    line = line_of(max_waiting=1000)
    for priority in range(10 * FEW):
        payer = Slo(name="batch", priority=-priority)
        line.join(str(priority), str(priority), payer, 0.0)
        if priority % 10:
            line.leave(str(priority))
        line.charge(payer, 5.0)
    assert len(line._turns) <= 10 * FEW // 10 + 2 * FEW
    assert [serve(line, ALICE, 1.0) for _ in range(3)] == ["0", "10", "20"]


def test_other_priorities_give_nobody_more_places() -> None:
    line, num_taken = WaitingLine[str](100), 0
    while not line.is_full(payer := Slo(name="batch", tenant="alice", priority=-num_taken)):
        line.join(str(num_taken), "A", payer, 0.0)
        num_taken += 1
    assert num_taken == 90
    assert not line.is_full(BOB)
    for number in range(num_taken):
        line.leave(str(number))
    assert line.num_waiting(ALICE) == 0


def test_a_line_that_is_made_shorter_sends_nobody_away() -> None:
    line = line_of("a", "b", "c")
    line.max_waiting = 1
    assert line.is_full(BOB)
    assert [serve(line, ALICE, 1.0) for _ in range(3)] == ["A", "B", "C"]
    assert not line.is_full(BOB)
