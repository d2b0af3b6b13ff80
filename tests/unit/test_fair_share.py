"""Payers of equal priority share by what they were given over their weights."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.fair_share import BURST_S, LEAD_S, MOST_SCALES, FairShare


@dataclass(frozen=True)
class Tenant:
    payer: str
    weight: float = 1.0
    priority: int = 0


A, B, C = (Tenant(name) for name in "abc")


def serve(shares: FairShare, waiting: list[Tenant], amount: float = 0.1) -> Tenant:
    """Whose turn it is, of these; it is given as much."""
    shares.present(waiting)
    first = min(waiting, key=shares.rank)
    shares.charge(first, amount)
    return first


def test_who_got_least_goes_first() -> None:
    shares = FairShare()
    shares.charge(A, 2.0)
    shares.charge(B, 1.0)
    assert shares.rank(C) < shares.rank(B) < shares.rank(A)


def test_twice_the_weight_is_charged_half() -> None:
    shares = FairShare(burst=0.0, lead=0.0)
    shares.charge(Tenant("a", 2.0), 2.0)
    shares.charge(B, 1.5)
    assert (shares.rank(A), shares.rank(B)) == (1.0, 1.5)


def test_priorities_do_not_share() -> None:
    shares = FairShare()
    above = Tenant("a", priority=1)
    shares.charge(above, 100.0)
    shares.present([above])
    assert shares.rank(A) == shares.rank(B) == 0.0, "nothing was given at their priority"


@pytest.mark.parametrize("absent_s", [10.0, 1000.0])
def test_an_absence_earns_no_more_than_a_burst(absent_s: float) -> None:
    shares = FairShare()
    for _ in range(int(absent_s / 0.1)):
        serve(shares, [A])
    turns = [serve(shares, [A, B]) for _ in range(1000)]
    num_first = turns.index(A)
    assert num_first * 0.1 == pytest.approx(BURST_S + LEAD_S, abs=0.2)
    rest = turns[num_first:]
    assert rest.count(A) == pytest.approx(rest.count(B), abs=2 * LEAD_S / 0.1)


def test_who_was_alone_for_long_pays_nothing_for_it() -> None:
    shares = FairShare(burst=0.0)
    for _ in range(1000):
        serve(shares, [A])
    turns = [serve(shares, [A, B]) for _ in range(100)]
    assert turns.count(A) == pytest.approx(50, abs=LEAD_S / 0.1 + 1)


def test_one_is_owed_until_it_has_caught_up() -> None:
    shares = FairShare()
    assert not shares.is_owed(A)
    for _ in range(10):
        serve(shares, [A], 1.0)
    shares.present([A, B])
    assert shares.is_owed(B)
    assert not shares.is_owed(A)
    shares.charge(B, BURST_S)
    assert not shares.is_owed(B)


@pytest.mark.parametrize("weight", [1.0, 4.0])
def test_who_was_given_more_by_over_a_burst_yields_to_the_other(weight: float) -> None:
    shares, other = FairShare(), Tenant("b", weight)
    shares.present([A, other])
    shares.charge(A, BURST_S / weight)
    assert not shares.yields_to(A, other)
    shares.charge(A, 0.1)
    assert shares.yields_to(A, other)
    assert not shares.yields_to(other, A)
    shares.charge(other, 0.2 * weight)
    assert not shares.yields_to(A, other)


def test_a_lower_priority_yields_whoever_was_given_more() -> None:
    shares, above = FairShare(), Tenant("above", priority=1)
    shares.charge(above, 100.0)
    assert shares.yields_to(A, above)
    assert not shares.yields_to(above, A)


def test_who_is_being_served_has_a_lead() -> None:
    shares = FairShare()
    turns = [serve(shares, [A, B], LEAD_S / 10) for _ in range(1000)]
    num_changes = sum(before is not after for before, after in pairwise(turns))
    assert 1000 / 25 < num_changes < 1000 / 8, "a turn lasts for a lead, there and back"


TENANTS = [Tenant("a"), Tenant("b", 2.0), Tenant("c", 0.5)]
MOST = 3  # of a charge


@given(
    burst=st.sampled_from([0.0, 5.0]),
    lead=st.sampled_from([0.0, 2.0]),
    rounds=st.lists(
        st.tuples(
            st.sets(st.integers(0, 2)), st.integers(1, MOST), st.integers(0, 2), st.booleans()
        ),
        max_size=100,
    ),
)
def test_those_who_want_something_all_the_time_get_as_much(
    burst: float, lead: float, rounds: list[tuple[set[int], int, int, bool]]
) -> None:
    """The theorem: over any time in which two are there, what they were given over their weights
    differs by no more than bursts, leads and largest charges over these weights."""
    shares = FairShare(burst, lead)
    given_to = dict.fromkeys(TENANTS, Fraction(0))
    since: dict[tuple[Tenant, Tenant], Fraction] = {}  # both are there: the difference at first
    for there, amount, outsider, is_outside in rounds:
        waiting = [TENANTS[index] for index in sorted(there)]
        pairs = [(a, b) for a in waiting for b in waiting if a is not b]
        since = {(a, b): since.get((a, b), given_to[a] - given_to[b]) for a, b in pairs}
        if waiting:
            served = serve(shares, waiting, amount)
        elif is_outside:  # nobody waits: whoever comes is served at once
            served = serve(shares, [TENANTS[outsider]], amount)
        else:
            continue
        given_to[served] += Fraction(amount) / Fraction(served.weight)
        for (a, b), at_first in since.items():
            extra = (lead + MOST) / a.weight + (lead + MOST) / b.weight
            bound = extra + burst / a.weight + burst / b.weight
            assert given_to[a] - given_to[b] - at_first <= bound + 1e-6


def test_payers_of_long_ago_are_forgotten() -> None:
    shares = FairShare()
    for number in range(5000):
        serve(shares, [Tenant(f"t{number}")], 1.0)
        serve(shares, [A], 1.0)
    assert len(shares._scales[0].tags) < 500


def test_only_so_many_priorities_are_remembered() -> None:
    shares = FairShare()
    for priority in range(-3 * MOST_SCALES, 0):
        unserved = Tenant("a", priority=priority - 2**20)
        shares.present([unserved])
        shares.charge(Tenant("a", priority=priority), 5.0)
        shares.charge(A, 1.0)
    assert len(shares._scales) <= MOST_SCALES + 1
    assert shares.rank(A) > shares.rank(B), "whoever is charged is not forgotten"
