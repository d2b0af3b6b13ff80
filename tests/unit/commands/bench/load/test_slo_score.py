"""The score of a run, against cases worked out by hand."""

from __future__ import annotations

from math import inf

import pytest

from pdserve.commands.bench.load.outcome import End, Outcome, Percentiles, Promise
from pdserve.commands.bench.load.slo_score import score, wilson

PROMISE = Promise(ttft_s=1.0, tpot_s=0.1)


def outcome(
    arrivals_s: list[float],
    num_received: int | None = None,
    end: End = "finished",
    due_s: float = 0.0,
    sent_s: float = 0.0,
    error: str = "",
) -> Outcome:
    count = len(arrivals_s) if num_received is None else num_received
    return Outcome(
        kind="chat",
        due_s=due_s,
        sent_s=sent_s,
        num_prompt=1,
        num_output=count,
        arrivals_s=arrivals_s,
        num_received=count,
        end=end,
        error=error,
    )


def test_times_of_one_request() -> None:
    seen = outcome([10.5, 10.6, 10.9], due_s=10.0, sent_s=10.2)
    assert seen.late_s == pytest.approx(0.2)
    assert seen.ttft_s == pytest.approx(0.5)  # from when it was due: a late client is no excuse
    assert seen.ttft_sent_s == pytest.approx(0.3)
    assert seen.tpot_s == pytest.approx(0.2)
    assert seen.gaps_s == pytest.approx([0.1, 0.3])


def test_tokens_that_come_together_have_no_gap_between_them() -> None:
    seen = outcome([1.0, 1.6], num_received=4)
    assert seen.gaps_s == pytest.approx([0.6, 0.0, 0.0])
    assert seen.tpot_s == pytest.approx(0.2)


def test_percentiles_are_said_as_far_as_there_are_any() -> None:
    assert Percentiles.of([0.001, 0.002, 0.003]).text(1) == "2.0/2.8/3.0"
    assert Percentiles.of([inf]).text(1) == "-/-/-"


def test_one_token_has_a_tpot_of_zero() -> None:
    assert outcome([1.0]).tpot_s == 0.0


def test_what_did_not_finish_has_no_tpot_but_may_have_a_ttft() -> None:
    assert outcome([], end="refused").ttft_s == inf
    broken = outcome([0.5, 0.6], end="failed")
    assert (broken.ttft_s, broken.tpot_s) == (0.5, inf)
    assert broken.gaps_s == pytest.approx([0.1])


def test_attainment_is_joint_and_of_all_that_were_sent() -> None:
    outcomes = [
        outcome([0.5, 0.6]),  # both
        outcome([1.0, 1.05]),  # both, the TTFT just so
        outcome([1.5, 1.55]),  # too late
        outcome([0.5, 0.7]),  # too slow
        outcome([], end="refused", error="429 overloaded"),
        outcome([], end="failed", error="502 node_lost"),
        outcome([0.2], num_received=1, end="unfinished"),
        outcome([], end="refused", error="429 overloaded"),
    ]
    scored = score(outcomes, PROMISE, target=0.25)
    assert scored.attainment == 2 / 8
    assert scored.ttft_attainment == 4 / 8  # the one that did not end had its first token in time
    assert scored.tpot_attainment == 3 / 8
    counts = (scored.sent, scored.finished, scored.refused, scored.failed, scored.unfinished)
    assert counts == (8, 4, 2, 1, 1)
    assert scored.errors == {"429 overloaded": 2, "502 node_lost": 1}
    assert scored.ttft_ms.p50 == pytest.approx(500)  # of 200, 500, 500, 1000, 1500


def test_who_refuses_the_few_that_are_much_work_attains_nothing() -> None:
    chats = [outcome([0.5, 0.55, 0.6]) for _ in range(9)]
    long = outcome([], end="refused")
    long.kind = "long"
    scored = score([*chats, long], PROMISE, 0.9)
    assert scored.worst_kind == "long"
    assert {kind: (of.met, of.sent) for kind, of in scored.kinds.items()} == {
        "chat": (9, 9),
        "long": (0, 1),
    }
    assert scored.kinds["chat"].ttft_ms.p99 == pytest.approx(500)
    assert scored.kinds["long"].ttft_ms.count == 0
    assert (scored.attainment, scored.slo_scale) == (0.0, None)
    assert score(chats, PROMISE, 0.9).attainment == 1.0


def test_two_marginal_attainments_may_be_less_together() -> None:
    late = [outcome([2.0, 2.05])] * 1
    slow = [outcome([0.5, 0.9])] * 1
    scored = score([*late, *slow, *[outcome([0.5, 0.6])] * 8], PROMISE, target=0.9)
    assert scored.ttft_attainment == scored.tpot_attainment == 0.9
    assert scored.attainment == 0.8


def test_the_scale_says_how_tight_the_promises_could_be() -> None:
    outcomes = [outcome([0.1 * i, 0.1 * i + 0.01]) for i in range(1, 11)]  # TTFT 0.1 to 1.0
    assert score(outcomes, PROMISE, target=0.9).slo_scale == pytest.approx(0.9)
    slow = [outcome([0.1, 0.4])]  # a TPOT of three times the promise
    assert score(slow, PROMISE, target=0.9).slo_scale == pytest.approx(3.0)
    mostly_refused = [outcome([0.1, 0.2]), outcome([], end="refused")]
    assert score(mostly_refused, PROMISE, target=0.9).slo_scale is None
    assert score(mostly_refused, PROMISE, target=0.5).slo_scale == pytest.approx(1.0)


def test_percentiles_are_linear_and_of_what_there_is() -> None:
    assert Percentiles.of([]) == Percentiles(0, None, None, None)
    assert Percentiles.of([inf]) == Percentiles(0, None, None, None)
    seen = Percentiles.of([0.0, 0.1, inf])
    assert (seen.count, seen.p50, seen.p90) == (2, pytest.approx(50), pytest.approx(90))


def test_throughput_counts_from_the_first_one_due() -> None:
    outcomes = [outcome([2.0, 3.0], due_s=1.0), outcome([4.0, 5.0], due_s=2.0)]
    assert score(outcomes, PROMISE, 0.9).tokens_per_s == pytest.approx(4 / 4)


def test_wilsons_interval() -> None:
    low, high = wilson(9, 10)  # as in the tables
    assert (low, high) == (pytest.approx(0.596, abs=1e-3), pytest.approx(0.982, abs=1e-3))
    assert wilson(0, 10)[0] == 0.0
    assert wilson(10, 10)[1] == 1.0
    assert wilson(900, 1000)[1] - wilson(900, 1000)[0] < 0.04
