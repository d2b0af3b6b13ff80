"""The calendar of decode legs, against a list of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.routing.loads.decode import BUCKET_S, NUM_BUCKETS, LoadForecast, Plan

HORIZON_S = NUM_BUCKETS * BUCKET_S

Move = tuple[float, int, float, float, int]  # time passes, then a leg: slot, join, lasts, tokens
MOVES = st.lists(
    st.tuples(
        st.floats(0, 2 * HORIZON_S),
        st.integers(0, 2),
        st.floats(0, 1.5 * HORIZON_S),
        st.floats(0, 1.5 * HORIZON_S),
        st.integers(1, 1000),
    ),
    max_size=12,
)


def covers(plan: Plan, bucket: int) -> bool:
    return plan.first <= bucket and (plan.end is None or bucket < plan.end)


@given(moves=MOVES, removed=st.lists(st.integers(0, 11), max_size=6, unique=True))
def test_a_column_has_the_legs_that_are_planned_then(moves: list[Move], removed: list[int]) -> None:
    forecast, now_s = LoadForecast(3, 0.0), 0.0
    plans: dict[int, Plan] = {}
    for number, (passes_s, slot, join_s, lasts_s, tokens) in enumerate(moves):
        now_s += passes_s
        join_s += now_s
        plans[number] = forecast.add(slot, now_s, join_s, join_s + lasts_s, tokens)
    for number in removed:
        if number in plans:
            forecast.remove(plans.pop(number), now_s)
    present = int(now_s // BUCKET_S)
    for ahead in (0, 1, 7, NUM_BUCKETS // 2, NUM_BUCKETS - 1):
        moment_s = (present + ahead + 0.5) * BUCKET_S
        requests, tokens_then = forecast.at(now_s, moment_s)
        for slot in range(3):
            then = [p for p in plans.values() if p.slot == slot and covers(p, present + ahead)]
            assert requests[slot] == len(then)
            assert tokens_then[slot] == sum(plan.num_tokens for plan in then)


def test_a_leg_beyond_the_horizon_is_there_until_it_ends() -> None:
    forecast = LoadForecast(1, 0.0)
    plan = forecast.add(0, 0.0, join_s=0.0, end_s=10 * HORIZON_S, num_tokens=5)
    later_s = 3 * HORIZON_S
    assert forecast.at(later_s, later_s + 1)[0][0] == 1
    assert not forecast.is_over(plan, later_s)
    forecast.remove(plan, later_s)
    assert not forecast.requests.any()
    assert not forecast.tokens.any()


def test_slots_are_added_without_forgetting() -> None:
    forecast = LoadForecast(1, 0.0)
    forecast.add(0, 0.0, join_s=0.0, end_s=5.0, num_tokens=5)
    forecast.reserve(3)
    forecast.add(2, 0.0, join_s=0.0, end_s=5.0, num_tokens=7)
    assert forecast.at(0.0, 1.0)[1].tolist() == [5, 0, 7]
