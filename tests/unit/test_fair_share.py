"""Payers of equal priority share by what they were given over their weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.shared.fair_share import BURST_S, MOST_SCALES, FairShare


@dataclass(frozen=True)
class Tenant:
    payer: str
    weight: float = 1.0
    priority: int = 0


A, B, C = (Tenant(name) for name in "abc")


def serve(
    shares: FairShare,
    waiting: list[Tenant],
    amount: float = 0.1,
    asked: Mapping[Tenant, float] | None = None,
) -> Tenant:
    """Whose turn it is, of these, who ask for so much; it is given `amount`."""
    wanted = asked or {}
    shares.present(waiting)
    first = min(waiting, key=lambda tenant: shares.rank(tenant, wanted.get(tenant, 0.0)))
    shares.charge(first, amount)
    return first


def test_who_got_least_goes_first() -> None:
    shares = FairShare()
    shares.charge(A, 2.0)
    shares.charge(B, 1.0)
    assert shares.rank(C) < shares.rank(B) < shares.rank(A)


def test_twice_the_weight_is_charged_half() -> None:
    shares = FairShare(burst=0.0)
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
    assert num_first * 0.1 == pytest.approx(BURST_S, abs=0.3)
    rest = turns[num_first:]
    assert rest.count(A) == pytest.approx(rest.count(B), abs=1)


def test_who_was_alone_for_long_pays_nothing_for_it() -> None:
    shares = FairShare(burst=0.0)
    for _ in range(1000):
        serve(shares, [A])
    turns = [serve(shares, [A, B]) for _ in range(100)]
    assert turns.count(A) == pytest.approx(50, abs=1)


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


def test_who_asks_for_less_is_served_whole() -> None:
    """They do not take turns: what the one receives, it no longer asks for."""
    shares, left = FairShare(), {A: 1.5, B: 1.0}
    turns = []
    while waiting := [tenant for tenant in (A, B) if left[tenant] > 0.01]:
        turns.append(serve(shares, waiting, 0.1, left))
        left[turns[-1]] -= 0.1
    assert turns == [B] * 10 + [A] * 15


@pytest.mark.parametrize("weight", [1.0, 4.0, 100.0])
def test_who_asks_for_little_at_a_time_leads_by_no_more_than_a_burst(weight: float) -> None:
    little = Tenant("little", weight)
    shares, asked = FairShare(), {A: 100.0, little: 0.1}
    turns = [serve(shares, [A, little], 0.1, asked) for _ in range(1000)]
    assert turns.index(A) * 0.1 == pytest.approx(BURST_S, abs=0.3)
    ahead = turns.count(little) - weight * turns.count(A)
    assert ahead == pytest.approx(BURST_S / 0.1, abs=2 * weight)


TENANTS = [Tenant("a"), Tenant("b", 2.0), Tenant("c", 0.5)]
MOST = 3  # of a charge


@given(
    burst=st.sampled_from([0.0, 5.0]),
    rounds=st.lists(
        st.tuples(
            st.dictionaries(st.integers(0, 2), st.sampled_from([0.0, 1.0, 4.0, 100.0])),
            st.integers(1, MOST),
            st.integers(0, 2),
            st.booleans(),
        ),
        max_size=100,
    ),
)
def test_those_who_want_something_all_the_time_get_as_much(
    burst: float, rounds: list[tuple[dict[int, float], int, int, bool]]
) -> None:
    """The theorem: over any time in which two are there, what they were given over their weights
    differs by no more than two bursts of the heavier one, and their own bursts and charges over
    these weights."""
    shares = FairShare(burst)
    given_to = dict.fromkeys(TENANTS, Fraction(0))
    since: dict[tuple[Tenant, Tenant], Fraction] = {}  # both are there: the difference at first
    for there, amount, outsider, is_outside in rounds:
        waiting = [TENANTS[index] for index in sorted(there)]
        pairs = [(a, b) for a in waiting for b in waiting if a is not b]
        since = {(a, b): since.get((a, b), given_to[a] - given_to[b]) for a, b in pairs}
        if waiting:
            asked = {TENANTS[index]: much for index, much in there.items()}
            served = serve(shares, waiting, amount, asked)
        elif is_outside:  # nobody waits: whoever comes is served at once
            served = serve(shares, [TENANTS[outsider]], amount)
        else:
            continue
        given_to[served] += Fraction(amount) / Fraction(served.weight)
        for (a, b), at_first in since.items():
            lead = 2 * burst / max(a.weight, b.weight)
            bound = lead + (burst + MOST) / a.weight + (burst + MOST) / b.weight
            assert given_to[a] - given_to[b] - at_first <= bound + 1e-6


def test_payers_of_long_ago_are_forgotten() -> None:
    shares = FairShare()
    for number in range(5000):
        serve(shares, [Tenant(f"t{number}")], 1.0)
        serve(shares, [A], 1.0)
    assert len(shares._scales[0].tags) < 500


def test_whoever_waits_is_not_forgotten_however_many_priorities_others_use() -> None:
    shares = FairShare()
    shares.charge(A, 5.0)
    for priority in range(1, 3 * MOST_SCALES):
        other = Tenant("c", priority=priority)
        shares.present([A, B, other])
        shares.charge(other, 1.0)
    assert shares.rank(A) > shares.rank(B), "both have waited all the time"


def test_more_priorities_than_are_remembered_may_be_active() -> None:
    active = [Tenant("a", priority=priority) for priority in range(2 * MOST_SCALES)]
    shares = FairShare()
    for payer in active:
        shares.present(active)
        shares.charge(payer, 5.0)
    for payer in active:
        assert shares.rank(payer) > shares.rank(Tenant("b", priority=payer.priority))


def test_only_so_many_priorities_are_remembered() -> None:
    shares = FairShare()
    for priority in range(-3 * MOST_SCALES, 0):
        unserved = Tenant("a", priority=priority - 2**20)
        shares.present([unserved])
        shares.charge(Tenant("a", priority=priority), 5.0)
        shares.charge(A, 1.0)
    assert len(shares._scales) <= MOST_SCALES + 1
    assert shares.rank(A) > shares.rank(B), "whoever is charged is not forgotten"


@given(
    before=st.lists(st.tuples(st.sampled_from([A, B, Tenant("c", 0.3, 0)]), st.floats(0, 20))),
    payers=st.sampled_from([[A], [B, A], [Tenant("c", 0.3, 0)], [A, Tenant("d", 2.0, 1)]]),
    amounts=st.lists(st.floats(0, 3), min_size=1, max_size=20),
)
def test_many_amounts_are_as_one_after_the_other(
    before: list[tuple[Tenant, float]], payers: list[Tenant], amounts: list[float]
) -> None:
    at_once, singly = FairShare(), FairShare()
    for shares in (at_once, singly):
        for payer, amount in before:
            shares.present([payer])
            shares.charge(payer, amount)
    parts = [(payer, 1 / len(payers)) for payer in payers]
    at_once.serve(payers, parts, amounts)
    for amount in amounts:
        singly.present(payers)
        for payer, part in parts:
            singly.charge(payer, amount * part)
    for tenant in (A, B, C, *payers):
        assert at_once.rank(tenant, 9.0) == singly.rank(tenant, 9.0)
        assert at_once.is_owed(tenant) == singly.is_owed(tenant)
