"""ITL of steady streams, with and without what disturbs them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.commands.bench.compare.interference import (
    EVERY_S,
    FIRST_S,
    PROMPTS,
    STREAM_TOKENS,
    STREAMS,
    compare_itl,
    steady_requests,
)
from pdserve.commands.bench.load.outcome import Outcome
from pdserve.commands.bench.load.scenarios import LONG_PROMPTS


def seen(kind: str, gaps_s: list[float], end: str = "finished") -> Outcome:
    arrivals = [sum(gaps_s[:i]) for i in range(len(gaps_s) + 1)]
    return Outcome(
        kind=kind,
        due_s=0.0,
        num_prompt=1,
        num_output=len(arrivals),
        arrivals_s=arrivals,
        num_received=len(arrivals),
        end=end,  # type: ignore[arg-type]
    )


def test_both_runs_have_the_same_streams_but_for_their_contents() -> None:
    """Who keeps answers gains nothing."""
    quiet = steady_requests(LONG_PROMPTS, 0, disturbed=False)
    disturbed = steady_requests(LONG_PROMPTS, 0, disturbed=True)
    for before, after in zip(quiet, disturbed, strict=False):
        assert replace(before, prompt=after.prompt) == after
        assert len(before.prompt) == len(after.prompt)
        assert before.prompt[:8] != after.prompt[:8]
    assert {(r.at_s, r.num_output) for r in quiet} == {(0.0, STREAM_TOKENS)}
    arrived = disturbed[STREAMS:]
    assert [r.at_s for r in arrived] == [FIRST_S + i * EVERY_S for i in range(PROMPTS)]
    assert {(r.kind, len(r.prompt), r.num_output) for r in arrived} == {("long", 4096, 64)}
    assert len({tuple(r.prompt[:8]) for r in disturbed}) == STREAMS + PROMPTS


def test_only_the_gaps_of_the_streams_count() -> None:
    quiet = [seen("stream", [0.01] * 100)]
    disturbed = [
        seen("stream", [0.01] * 50 + [0.03] * 50),
        seen("long", [9.0]),
        seen("long", [], end="refused"),
    ]
    found = compare_itl(quiet, disturbed)
    assert found.quiet_itl_ms.p99 == pytest.approx(10)
    assert found.disturbed_itl_ms.p99 == pytest.approx(30)
    assert found.p99_ratio == pytest.approx(3.0)
    assert (found.prompts_sent, found.prompts_finished, found.streams_finished) == (2, 1, 2)


def test_streams_without_tokens_have_no_ratio() -> None:
    assert compare_itl([seen("stream", [])], [seen("stream", [0.1])]).p99_ratio is None
