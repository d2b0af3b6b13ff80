"""Reading histograms back out of a Prometheus text."""

from __future__ import annotations

import math

import pytest

from pdserve.commands.cluster.scrape import between, parse
from pdserve.metrics import NodeMetrics


def test_the_difference_of_two_looks_is_what_happened_between_them() -> None:
    metrics = NodeMetrics()
    metrics.step_time.observe(0.1)
    before = parse(metrics.exposition().decode())
    for seconds in (0.002, 0.002, 0.004, 0.004):
        metrics.step_time.observe(seconds)
    delta = between(before, parse(metrics.exposition().decode()), "pdserve_step_seconds")
    assert delta.count == 4
    assert delta.mean == pytest.approx(0.003)
    assert delta.quantile(0.5) == pytest.approx(0.0025)  # upper end of the bucket of the first two
    assert 0.0025 < delta.quantile(0.9) < 0.005


def test_nothing_observed_is_not_a_number() -> None:
    look = parse(NodeMetrics().exposition().decode())
    delta = between(look, look, "pdserve_step_seconds")
    assert math.isnan(delta.mean)
    assert math.isnan(delta.quantile(0.5))


def test_counters_kept_by_others_are_read_when_scraped() -> None:
    metrics = NodeMetrics()
    state = {"pulls": 1.0}
    metrics.count("pulls", "Complete pulls", lambda: state["pulls"])
    state["pulls"] = 7.0
    assert parse(metrics.exposition().decode())["pdserve_pulls_total"] == 7.0
